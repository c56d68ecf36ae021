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

template <std::size_t... kRows>
gemm::BlockwiseLaunch find_sm80(int row, int group, int bits, std::index_sequence<kRows...>) {
  static constexpr Variants kTable[] = {{{{&launch_sm80<kRows, 32, 4>, &launch_sm80<kRows, 32, 8>},
                                          {&launch_sm80<kRows, 64, 4>, &launch_sm80<kRows, 64, 8>},
                                          {&launch_sm80<kRows, 128, 4>, &launch_sm80<kRows, 128, 8>}}}...};
  auto const place = std::ranges::find(kGroups, group) - kGroups.begin();
  return kTable[row].by_group_and_bits[place][bits == 8];
}

void launch_row_of_sm80(int row, OnlineQuantProblem const& problem, Work const& work, int device, Stream stream) {
  int const group = static_cast<int>(problem.group_size);
  find_sm80(row, group, problem.bits, std::make_index_sequence<kTiles.size()>{})(work.gemm, device, stream);
}
#else
void launch_row_of_sm80(int, OnlineQuantProblem const&, Work const&, int, Stream) {}
#endif

#if EPILOQ_HAS_SM90
template <std::size_t... kRows>
gemm::BlockwiseLaunch find_sm90(int row, int bits, std::index_sequence<kRows...>) {
  static constexpr gemm::BlockwiseLaunch kTable[][2] = {{&launch_sm90<kRows, 4>, &launch_sm90<kRows, 8>}...};
  return kTable[row][bits == 8];
}

void launch_row_of_sm90(int row, OnlineQuantProblem const& problem, Work const& work, int device, Stream stream) {
  find_sm90(row, problem.bits, std::make_index_sequence<kSm90Tiles.size()>{})(work.gemm, device, stream);
}
#else
void launch_row_of_sm90(int, OnlineQuantProblem const&, Work const&, int, Stream) {}
#endif

}  // namespace

Target target_of_device(int device) {
  DeviceProperties const& properties = device_properties(device);
  int const capability = properties.compute_capability;
  Arch const forced = forced_arch();
  Arch arch = Arch::kSm75;  // the staged pipeline, which is built for all
  if (kFused && capability >= 80 && forced != Arch::kSm75) arch = Arch::kSm80;
  if (EPILOQ_HAS_SM90 && capability == 90 && (forced == Arch::kAuto || forced == Arch::kSm90)) arch = Arch::kSm90;
  return {arch, properties.sm_count, properties.shared_memory_per_block};
}

void launch(Choice const& choice, OnlineQuantProblem const& problem, Work const& work, int device, Stream stream) {
  DeviceGuard const guard(device);
  quantize_blockwise_int8::launch(work.quantise, work.gemm.dtype, device, stream);
  switch (choice.family) {
    case Family::kStaged:
      return launch_staged(work, device, stream);
    case Family::kSm90:
      return launch_row_of_sm90(choice.row, problem, work, device, stream);
    case Family::kSm80:
      return launch_row_of_sm80(choice.row, problem, work, device, stream);
  }
}
#else
Target target_of_device(int device) {
  device_properties(device);
  return {};
}

void launch(Choice const&, OnlineQuantProblem const&, Work const&, int device, Stream) { device_properties(device); }
#endif

}  // namespace epiloq::ops::online_quant_mm
