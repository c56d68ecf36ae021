#pragma once

// From a table row to the launch, for one type, bit width and group size.

#include <algorithm>

#include "core/ceil_div.h"
#include "core/cuda_check.h"
#include "dispatch/weight_only_mm/tables.h"
#include "epiloq/device.h"
#include "kernels/launch/weight_only_mm.h"
#include "kernels/sm80/w4a16_gemm.cuh"
#include "kernels/sm80/w4a16_gemv.cuh"
#include "kernels/sm80/w4a16_gemv_integer.cuh"

namespace epiloq::ops::weight_only_mm {

template <class Layout>
void launch_kernel(void (*kernel)(Problem, Layout), PerDevice& prepared, Problem const& p, Layout const& layout,
                   dim3 grid, int threads, int shared_bytes, int device, Stream stream) {
  prepared.once(device, [kernel, device] {
    int const most = device_properties(device).shared_memory_per_block;
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most),
               "asking for shared memory");
  });
  cuda_check(launch_pdl_clusters(kernel, grid, dim3(1, grid.y), threads, shared_bytes, stream, p, layout),
             "launching epiloq.weight_only_mm");
}

template <int kRow, DType kX, int kBits, int kGroups, bool kOffsets>
void launch_gemv(Problem const& p, int split, int device, Stream stream) {
  constexpr GemvConfig kConfig = kGemvRows[kRow];
  using T = CudaType<kX>;
  constexpr int kPanels = kConfig.panels_of(kBits);
  using Products = std::conditional_t<kConfig.digits, DigitProducts<T, kBits, kGroups, kOffsets, kPanels>,
                                      HalfProducts<T, kBits, kGroups, kOffsets, kPanels>>;
  using S = Gemv<Products, kPanels, kConfig.warps, kConfig.stages, kConfig.blocks>;
  static PerDevice prepared;
  StageLayout const weights = StageLayout::of(p.weight, kPanels, kGroups);
  GemvPipeline const pipeline{weights, weights.bytes + Products::token_bytes(p.m), S::kStages,
                              Products::scratch_bytes(p.m), gemv_received_bytes(p.m, S::kRows, split)};
  dim3 const grid(static_cast<unsigned>(ceil_div(p.weight.n, S::kRows)), split);
  int const own_bytes = pipeline.received + std::max(S::kWarps * pipeline.warp_bytes(), S::kSumBytes);
  int const shared_bytes = gemv_shared_bytes(own_bytes, grid, device_properties(device));
  launch_kernel(gemv_kernel<S, T>, prepared, p, pipeline, grid, S::kThreads, shared_bytes, device, stream);
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
  launch_kernel(tiled_kernel<S, CudaType<kX>>, prepared, p, layout, grid, S::kThreads, shared_bytes, device, stream);
}

}  // namespace epiloq::ops::weight_only_mm
