#pragma once

// From a table row to the launch.

#include "core/cuda_check.h"
#include "dispatch/conv2d_int8/tables.h"
#include "kernels/conv2d/int8_gemm.cuh"

namespace epiloq::ops::conv2d_int8 {

template <int kRow>
void launch_tiled(TiledProblem const& t, unsigned blocks, int split, int device, Stream stream) {
  static constexpr TileConfig kTile = kTiles[kRow];
  using T = Tiled<kTile.mma, kTile.warp_m, kTile.warp_n, kTile.warps_m, kTile.warps_n, kTile.depth, kTile.stages,
                  kTile.vector, kTile.blocks>;
  static_assert(T::kThreads == kTile.threads() && T::Mainloop::kAhead == kTile.ahead() && sizeof(conv2d::Window) == 16);
  auto* const kernel = tiled_kernel<T, kTile.pipeline_bytes()>;
  static PerDevice prepared;
  prepared.allow_shared(kernel, kTile.shared_bytes(), device);
  dim3 const grid(blocks, t.problem.shape.groups, split);
  cuda_check(launch_pdl_clusters(kernel, grid, dim3(1, 1, split), T::kThreads, kTile.shared_bytes(), stream, t),
             "launching epiloq.conv2d_int8");
}

}  // namespace epiloq::ops::conv2d_int8
