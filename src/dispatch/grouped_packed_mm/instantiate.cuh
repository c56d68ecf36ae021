#pragma once

// From a table row to the launch, for one type and weight format.

#include <algorithm>

#include "core/ceil_div.h"
#include "core/cuda_check.h"
#include "kernels/launch/grouped_packed_mm.h"
#include "kernels/sm80/w4a16_expert_gemm.cuh"
#include "kernels/sm80/w4a16_gemv_fp4.cuh"
#include "kernels/sm80/w4a16_launch.cuh"

namespace epiloq::ops::grouped_packed_mm {

inline constexpr char kLaunching[] = "launching epiloq.grouped_packed_mm";

template <class T, Format kFormat>
struct FormatOf {
  static constexpr int kBits = kFormat == Format::kInt8Wide ? 8 : 4;
  static constexpr int kGroups = kFormat == Format::kInt4Of64 ? 2 : kFormat == Format::kInt4Of32 ? 4 : 1;
  using Fragment = wo::Fragment<T, kBits>;
};
template <class T>
struct FormatOf<T, Format::kMxfp4> {
  static constexpr int kBits = 4, kGroups = 4;
  using Fragment = wo::Mxfp4Fragment<T>;
};
template <class T>
struct FormatOf<T, Format::kNvfp4> {
  static constexpr int kBits = 4, kGroups = 8;
  using Fragment = wo::Nvfp4Fragment<T>;
};

template <int kRow, DType kX, Format kFormat>
void launch_grouped(Problem const& p, int tiles, int split, int device, Stream stream) {
  constexpr Config kConfig = kRows[kRow];
  using T = CudaType<kX>;
  using F = FormatOf<T, kFormat>;
  constexpr int kStages = F::kBits == 4 ? kConfig.stages4 : kConfig.stages8;
  using S = wo::Tiled<T, F::kBits, F::kGroups, false, kWarps, kConfig.tokens, kStages, kConfig.blocks,
                      typename F::Fragment, kConfig.columns>;
  static_assert(S::kRows == kTileRows);
  static PerDevice prepared;
  wo::StageLayout const layout = wo::StageLayout::of(p.product.weight, S::kPanels, F::kGroups);
  int const shared_bytes = kExpertWorkBytes + std::max(S::kStages * S::stage_bytes(layout), S::kSumBytes);
  dim3 const grid(static_cast<unsigned>(tiles) * static_cast<unsigned>(ceil_div(p.product.weight.n, S::kRows)), split);
  wo::launch_kernel(grouped_kernel<S, T>, prepared, kLaunching, p, layout, grid, S::kThreads, shared_bytes, device,
                    stream);
}

template <int kRow, DType kX, Format kFormat>
void launch_gemv(Problem const& p, int, int split, int device, Stream stream) {
  constexpr Fp4GemvConfig kConfig = kGemvRows[kRow];
  using T = CudaType<kX>;
  using F = FormatOf<T, kFormat>;
  using Products = wo::Fp4Products<T, F::kGroups, kConfig.panels, kConfig.tiles>;
  using S = wo::Gemv<Products, kConfig.panels, kConfig.warps, kConfig.stages, kConfig.blocks>;
  wo::launch_gemv_kernel<S, T, F::kGroups>(kLaunching, p.product, p.factor, split, device, stream);
}

}  // namespace epiloq::ops::grouped_packed_mm
