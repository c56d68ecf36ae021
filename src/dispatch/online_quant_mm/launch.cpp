#include "dispatch/online_quant_mm/launch.h"

#include <algorithm>
#include <utility>

#include "epiloq/error.h"

#if EPILOQ_HAS_CUDA
#include "core/cuda_check.h"
#include "dispatch/online_quant_mm/tables.h"
#include "kernels/launch/online_quant_mm.h"
#endif

namespace epiloq::ops::online_quant_mm {

#if EPILOQ_HAS_CUDA
namespace {

// Kernels of each family by table row, group size and bits; null if this build lacks them.
struct Sm75 {
  static constexpr std::size_t kRows = kSm75Tiles.size();
  template <int kRow, int kGroup, int kBits>
  static constexpr gemm::OnlineQuantGemmLaunch launch() {
    if constexpr (EPILOQ_HAS_SM75) return &launch_sm75<kRow, kGroup, kBits>;
    return nullptr;
  }
};
struct Sm80 {
  static constexpr std::size_t kRows = kTiles.size();
  template <int kRow, int kGroup, int kBits>
  static constexpr gemm::OnlineQuantGemmLaunch launch() {
    if constexpr (EPILOQ_HAS_SM80 || EPILOQ_HAS_SM90) return &launch_sm80<kRow, kGroup, kBits>;
    return nullptr;
  }
};
struct Sm90 {
  static constexpr std::size_t kRows = kSm90Tokens.size();
  template <int kRow, int kGroup, int kBits>
  static constexpr gemm::OnlineQuantGemmLaunch launch() {
    if constexpr (EPILOQ_HAS_SM90 && kGroup == kSm90Group) return &launch_sm90<kRow, kBits>;
    return nullptr;
  }
};

template <class F, std::size_t... kRows>
gemm::OnlineQuantGemmLaunch kernel_of(int row, OnlineQuantProblem const& p, std::index_sequence<kRows...>) {
  static constexpr gemm::OnlineQuantGemmLaunch kTable[][kGroups.size()][2] = {
      {{F::template launch<kRows, 32, 4>(), F::template launch<kRows, 32, 8>()},
       {F::template launch<kRows, 64, 4>(), F::template launch<kRows, 64, 8>()},
       {F::template launch<kRows, 128, 4>(), F::template launch<kRows, 128, 8>()}}...};
  return kTable[row][std::ranges::find(kGroups, p.group_size) - kGroups.begin()][p.bits == 8];
}

template <class F>
gemm::OnlineQuantGemmLaunch kernel_of(int row, OnlineQuantProblem const& p) {
  gemm::OnlineQuantGemmLaunch const kernel = kernel_of<F>(row, p, std::make_index_sequence<F::kRows>{});
  if (kernel == nullptr) throw Unsupported("epiloq.online_quant_mm: this build lacks the kernel; see EPILOQ_ARCHS");
  return kernel;
}

gemm::OnlineQuantGemmLaunch kernel_of(Choice const& choice, OnlineQuantProblem const& problem) {
  switch (choice.family) {
    case Family::kSm75:
      return kernel_of<Sm75>(choice.row, problem);
    case Family::kSm80:
      return kernel_of<Sm80>(choice.row, problem);
    case Family::kSm90:
      return kernel_of<Sm90>(choice.row, problem);
    case Family::kStaged:
      break;
  }
  return nullptr;
}

}  // namespace

void launch(Choice const& choice, OnlineQuantProblem const& problem, Work const& work, int device, Stream stream) {
  gemm::OnlineQuantGemmLaunch const kernel = kernel_of(choice, problem);
  DeviceGuard const guard(device);
  quantize_blockwise_int8::launch(work.quantise, work.gemm.dtype, device, stream);
  if (kernel == nullptr) return launch_staged(work, device, stream);
  kernel(work.gemm, device, stream);
}
#else
void launch(Choice const&, OnlineQuantProblem const&, Work const&, int device, Stream) { device_properties(device); }
#endif

}  // namespace epiloq::ops::online_quant_mm
