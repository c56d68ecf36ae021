#include "ops/weight_only_mm/launch.h"

#include <array>
#include <type_traits>
#include <utility>

#include "epiloq/error.h"

#if EPILOQ_HAS_CUDA
#include "core/cuda_check.h"
#include "ops/weight_only_mm/rows.h"
#endif

namespace epiloq::ops::weight_only_mm {

#if EPILOQ_HAS_CUDA
namespace {

struct StreamFamily {
  static constexpr int kRows = static_cast<int>(kStreamRows.size());
  template <int kRow, DType kX, int kBits, int kGroups, bool kOffsets>
  static constexpr Launch kLaunch = &launch_stream<kRow, kX, kBits, kGroups, kOffsets>;
};
struct TiledFamily {
  static constexpr int kRows = static_cast<int>(kTiledRows.size());
  template <int kRow, DType kX, int kBits, int kGroups, bool kOffsets>
  static constexpr Launch kLaunch = &launch_tiled<kRow, kX, kBits, kGroups, kOffsets>;
};
struct WgmmaFamily {
  static constexpr int kRows = static_cast<int>(kWgmmaRows.size());
  template <int kRow, DType kX, int kBits, int kGroups, bool kOffsets>
  static constexpr Launch kLaunch = kOffsets ? nullptr : &launch_wgmma<kRow, kX, kBits, kGroups>;
};

// SM75 has the last row of each table but SM90's own, in float16.
template <class Family, int kRow, DType kX, int kBits, int kGroups, bool kOffsets>
constexpr Launch built() {
  constexpr bool kIsWgmma = std::is_same_v<Family, WgmmaFamily>;
  constexpr bool kNewer = EPILOQ_HAS_SM90 || (EPILOQ_HAS_SM80 && !kIsWgmma);
  if constexpr (kNewer || (!kIsWgmma && kX == DType::kFloat16 && kRow + 1 == Family::kRows)) {
    return Family::template kLaunch<kRow, kX, kBits, kGroups, kOffsets>;
  } else {
    return nullptr;
  }
}

// A row's kernels by type, bits, groups in a step, and whether there are offsets.
using ByGroups = std::array<std::array<Launch, 2>, 3>;
using Variants = std::array<std::array<ByGroups, 2>, 2>;

template <class Family, int kRow, DType kX, int kBits>
constexpr ByGroups by_groups() {
  return {{{built<Family, kRow, kX, kBits, 1, false>(), built<Family, kRow, kX, kBits, 1, true>()},
           {built<Family, kRow, kX, kBits, 2, false>(), built<Family, kRow, kX, kBits, 2, true>()},
           {built<Family, kRow, kX, kBits, 4, false>(), built<Family, kRow, kX, kBits, 4, true>()}}};
}

template <class Family, int... kRows>
constexpr std::array<Variants, sizeof...(kRows)> table(std::integer_sequence<int, kRows...>) {
  return {Variants{
      {{by_groups<Family, kRows, DType::kFloat16, 4>(), by_groups<Family, kRows, DType::kFloat16, 8>()},
       {by_groups<Family, kRows, DType::kBFloat16, 4>(), by_groups<Family, kRows, DType::kBFloat16, 8>()}}}...};
}

template <class Family>
constexpr auto kTable = table<Family>(std::make_integer_sequence<int, Family::kRows>{});

Variants const& variants_of(Choice const& choice) {
  switch (choice.family) {
    case Family::kStream:
      return kTable<StreamFamily>[choice.row];
    case Family::kTiled:
      return kTable<TiledFamily>[choice.row];
    default:
      return kTable<WgmmaFamily>[choice.row];
  }
}

int groups_index(int group) { return group == 32 ? 2 : group == 64 ? 1 : 0; }

}  // namespace

Target target_of_device(int device) {
  DeviceProperties const& properties = device_properties(device);
  Arch const forced = forced_arch();
  for (Arch arch : {Arch::kSm90, Arch::kSm80, Arch::kSm75}) {
    if (forced != Arch::kAuto && forced != arch) continue;
    int const capability = properties.compute_capability;
    if (is_built(arch) && capability >= static_cast<int>(arch)) {
      bool const has_wgmma = arch == Arch::kSm90 && capability == static_cast<int>(arch);
      return {arch, properties.sm_count, properties.shared_memory_per_block, has_wgmma};
    }
  }
  throw Unsupported("epiloq.weight_only_mm: no kernel for cuda:" + std::to_string(device) + " (compute capability " +
                    std::to_string(properties.compute_capability) + ", arch " + name(forced) + ") in this build");
}

void launch(Choice const& choice, Problem const& problem, DType x, int device, Stream stream) {
  DeviceGuard const guard(device);
  Weight const& w = problem.weight;
  Launch const launch =
      variants_of(choice)[x == DType::kBFloat16][w.bits == 8][groups_index(w.group)][w.offset != nullptr];
  if (launch == nullptr) throw Unsupported("epiloq.weight_only_mm: this build lacks the kernel; see EPILOQ_ARCHS");
  launch(problem, choice.split, device, stream);
}
#else
Target target_of_device(int device) {
  device_properties(device);
  return {};
}

void launch(Choice const&, Problem const&, DType, int device, Stream) { device_properties(device); }
void launch_dequantize(DequantizeProblem const&, int device, Stream) { device_properties(device); }
#endif

}  // namespace epiloq::ops::weight_only_mm
