#pragma once

// From a table row to the launch, for one type, bit width and group size.

#include <algorithm>

#include "core/ceil_div.h"
#include "core/cuda_check.h"
#include "dispatch/weight_only_mm/tables.h"
#include "kernels/launch/weight_only_mm.h"
#include "kernels/sm80/w4a16/gemm.cuh"
#include "kernels/sm80/w4a16/gemv.cuh"
#include "kernels/sm80/w4a16/gemv_integer.cuh"
#include "kernels/sm80/w4a16/launch.cuh"

namespace epiloq::ops::weight_only_mm {

inline constexpr char kLaunching[] = "launching epiloq.weight_only_mm";

template <int kRow, DType kX, int kBits, int kGroups, bool kOffsets>
void launch_gemv(Problem const& p, int split, int device, Stream stream) {
  constexpr GemvConfig kConfig = kGemvRows[kRow];
  using T = CudaType<kX>;
  constexpr int kPanels = kConfig.panels_of(kBits);
  using Products = std::conditional_t<kConfig.integer, IntegerProducts<T, kBits, kGroups, kOffsets, kPanels>,
                                      HalfProducts<T, kBits, kGroups, kOffsets, kPanels>>;
  using S = Gemv<Products, kPanels, kConfig.warps, kConfig.stages, kConfig.blocks>;
  launch_gemv_kernel<S, T, kGroups>(kLaunching, p, nullptr, split, device, stream);
}

template <int kRow, DType kX, int kBits, int kGroups, bool kOffsets>
void launch_tiled(Problem const& p, int split, int device, Stream stream) {
  constexpr TiledConfig kConfig = kTiledRows[kRow];
  using S = Tiled<CudaType<kX>, kBits, kGroups, kOffsets, kConfig.warps, kConfig.tokens, kConfig.stages(kBits),
                  kConfig.blocks>;
  static PerDevice prepared;
  StageLayout const layout = StageLayout::of(p.weight, S::kPanels, kGroups);
  int const shared_bytes = std::max(S::kStages * S::stage_bytes(layout), S::kSumBytes);
  // CTAs of the same rows start together and share weights in L2.
  auto const tiles = [](int size, int of_tile) { return static_cast<unsigned>(ceil_div(size, of_tile)); };
  dim3 const grid(tiles(p.m, S::kTokens), split, tiles(p.weight.n, S::kRows));
  launch_kernel(tiled_kernel<S, CudaType<kX>>, prepared, kLaunching, p, layout, grid, S::kThreads, shared_bytes, device,
                stream);
}

}  // namespace epiloq::ops::weight_only_mm
