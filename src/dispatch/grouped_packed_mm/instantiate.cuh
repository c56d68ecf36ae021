#pragma once

// From a table row to the launch, for one type and weight format.

#include <algorithm>

#include "core/ceil_div.h"
#include "core/cuda_check.h"
#include "kernels/launch/grouped_packed_mm.h"
#include "kernels/sm80/w4a16/expert_gemm.cuh"
#include "kernels/sm80/w4a16/gemv_fp4.cuh"
#include "kernels/sm80/w4a16/launch.cuh"

namespace epiloq::ops::grouped_packed_mm {

inline constexpr char kLaunching[] = "launching epiloq.grouped_packed_mm";

template <class T, Format kFormat>
struct FragmentOf {
  using Type = wo::Fragment<T, bits_of(kFormat)>;
};
template <class T>
struct FragmentOf<T, Format::kMxfp4> {
  using Type = wo::Mxfp4Fragment<T>;
};
template <class T>
struct FragmentOf<T, Format::kNvfp4> {
  using Type = wo::Nvfp4Fragment<T>;
};

template <int kRow, DType kX, Format kFormat>
void launch_grouped(Problem const& p, int tiles, int split, int device, Stream stream) {
  constexpr Config kConfig = kRows[kRow];
  using T = CudaType<kX>;
  constexpr int kBits = bits_of(kFormat), kGroups = groups_of(kFormat);
  constexpr int kStages = kBits == 4 ? kConfig.stages4 : kConfig.stages8;
  using S = wo::Tiled<T, kBits, kGroups, false, kWarps, kConfig.tokens, kStages, kConfig.blocks,
                      typename FragmentOf<T, kFormat>::Type, kConfig.columns>;
  static_assert(S::kRows == kTileRows);
  static PerDevice prepared;
  wo::StageLayout const layout = wo::StageLayout::of(p.product.weight, S::kPanels, kGroups);
  int const shared_bytes = kExpertWorkBytes + std::max(S::kStages * S::stage_bytes(layout), S::kSumBytes);
  dim3 const grid(static_cast<unsigned>(tiles) * static_cast<unsigned>(ceil_div(p.product.weight.n, S::kRows)), split);
  wo::launch_kernel(grouped_kernel<S, T>, prepared, kLaunching, p, layout, grid, S::kThreads, shared_bytes, device,
                    stream);
}

template <int kRow, DType kX, Format kFormat>
void launch_gemv(Problem const& p, int, int split, int device, Stream stream) {
  constexpr Fp4GemvConfig kConfig = kGemvRows[kRow];
  using T = CudaType<kX>;
  constexpr int kGroups = groups_of(kFormat);
  using Products = wo::Fp4Products<T, kGroups, kConfig.panels, kConfig.tiles>;
  using S = wo::Gemv<Products, kConfig.panels, kConfig.warps, kConfig.stages, kConfig.blocks>;
  wo::launch_gemv_kernel<S, T, kGroups>(kLaunching, p.product, p.factor, split, device, stream);
}

}  // namespace epiloq::ops::grouped_packed_mm
