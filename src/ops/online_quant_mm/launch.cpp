#include "ops/online_quant_mm/launch.h"

#include <algorithm>
#include <utility>

#include "epiloq/error.h"

#if EPILOQ_HAS_CUDA
#include "core/cuda_check.h"
#include "ops/online_quant_mm/configs.h"
#include "ops/online_quant_mm/kernels.h"
#endif

namespace epiloq::ops::online_quant_mm {

#if EPILOQ_HAS_CUDA
namespace {

constexpr bool kFused = EPILOQ_HAS_SM80 || EPILOQ_HAS_SM90;

#if EPILOQ_HAS_SM80 || EPILOQ_HAS_SM90
// A row of the table: one tile's kernels, by group size and bits.
struct Variants {
  gemm::BlockwiseLaunch by_group_and_bits[kGroups.size()][2];
};

template <int kRow>
constexpr Variants variants() {
  return {{{&launch_blockwise<kRow, 32, 4>, &launch_blockwise<kRow, 32, 8>},
           {&launch_blockwise<kRow, 64, 4>, &launch_blockwise<kRow, 64, 8>},
           {&launch_blockwise<kRow, 128, 4>, &launch_blockwise<kRow, 128, 8>}}};
}

template <std::size_t... kRows>
gemm::BlockwiseLaunch find(int row, int group, int bits, std::index_sequence<kRows...>) {
  static constexpr Variants kTable[] = {variants<kRows>()...};
  auto const place = std::ranges::find(kGroups, group) - kGroups.begin();
  return kTable[row].by_group_and_bits[place][bits == 8];
}

void launch_fused(int row, OnlineQuantProblem const& problem, Work const& work, int device, Stream stream) {
  auto const kernel =
      find(row, static_cast<int>(problem.group_size), problem.bits, std::make_index_sequence<kTiles.size()>{});
  kernel(work.gemm, device, stream);
}
#else
void launch_fused(int, OnlineQuantProblem const&, Work const&, int, Stream) {
  throw Unsupported("epiloq.online_quant_mm: this build lacks the fused kernels; see EPILOQ_ARCHS");
}
#endif

}  // namespace

Target target_of_device(int device) {
  DeviceProperties const& properties = device_properties(device);
  Arch const forced = forced_arch();
  bool const fused = kFused && properties.compute_capability >= 80 && forced != Arch::kSm75;
  Arch const newest = properties.compute_capability >= 90 ? Arch::kSm90 : Arch::kSm80;
  Arch const arch = fused ? (forced == Arch::kAuto ? newest : forced) : Arch::kSm75;
  return {arch, properties.sm_count, properties.shared_memory_per_block};
}

void launch(int choice, OnlineQuantProblem const& problem, Work const& work, int device, Stream stream) {
  DeviceGuard const guard(device);
  quantize_blockwise_int8::launch(work.quantise, work.gemm.dtype, device, stream);
  if (choice == kStaged) return launch_staged(work, device, stream);
  launch_fused(choice, problem, work, device, stream);
}
#else
Target target_of_device(int device) {
  device_properties(device);
  return {};
}

void launch(int, OnlineQuantProblem const&, Work const&, int device, Stream) { device_properties(device); }
#endif

}  // namespace epiloq::ops::online_quant_mm
