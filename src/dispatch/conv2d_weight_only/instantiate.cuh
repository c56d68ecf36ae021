#pragma once

// From a row of the mma.sync table to the launch, for one type, bit width and group size.

#include <algorithm>

#include "core/cuda_check.h"
#include "dispatch/conv2d_weight_only/tables.h"
#include "kernels/sm80/conv2d_w4a16_gemm.cuh"
#include "kernels/sm80/w4a16/launch.cuh"

namespace epiloq::ops::conv2d_weight_only {

template <int kRow, DType kX, int kBits, int kGroups, bool kOffsets>
void launch_patches(Patches const& problem, int split, int device, Stream stream) {
  constexpr wo::TiledConfig kConfig = kRows[kRow];
  using S = wo::Tiled<CudaType<kX>, kBits, kGroups, kOffsets, kConfig.warps, kConfig.tokens, kConfig.stages(kBits),
                      kConfig.blocks>;
  static PerDevice prepared;
  wo::Problem const& product = problem.product;
  auto const layout = wo::StageLayout::of(product.weight, S::kPanels, kGroups);
  Patches patches = problem;
  patches.windows_at = std::max(S::kStages * S::stage_bytes(layout), S::kSumBytes);
  int const shared_bytes = patches.windows_at + S::kTokens * static_cast<int>(sizeof(conv2d::Window));
  dim3 const grid((product.m + S::kTokens - 1) / S::kTokens, split, (product.weight.n + S::kRows - 1) / S::kRows);
  wo::launch_kernel(patches_kernel<S, CudaType<kX>>, prepared, "launching epiloq.conv2d_weight_only", patches, layout,
                    grid, S::kThreads, shared_bytes, device, stream);
}

}  // namespace epiloq::ops::conv2d_weight_only
