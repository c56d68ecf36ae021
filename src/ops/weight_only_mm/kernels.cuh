#pragma once

// One row of a table, for one type, width and group size, from the problem to the launch.

#include <algorithm>

#include "core/cuda_check.h"
#include "epiloq/device.h"
#include "ops/weight_only_mm/rows.h"
#include "ops/weight_only_mm/stream.cuh"
#include "ops/weight_only_mm/tiled.cuh"

namespace epiloq::ops::weight_only_mm {

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

template <class Ring>
void launch_kernel(void (*kernel)(Problem, Ring), PerDevice& prepared, Problem const& p, Ring const& ring, int blocks,
                   int threads, int shared_bytes, int device, Stream stream) {
  prepared.once(device, [kernel, device] {
    int const most = device_properties(device).shared_memory_per_block;
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most),
               "asking for shared memory");
  });
  cuda_check(launch_dependent_clusters(kernel, blocks * ring.split, ring.split, threads, shared_bytes, stream, p, ring),
             "launching epiloq.weight_only_mm");
}

template <int kRow, DType kX, int kBits, int kGroups>
void launch_stream(Problem const& p, int split, int device, Stream stream) {
  constexpr StreamConfig kConfig = kStreamRows[kRow];
  using S = Streaming<CudaType<kX>, kBits, kGroups, kConfig.slabs_of(kBits), kConfig.warps, kConfig.stages>;
  static PerDevice prepared;
  StageLayout const weights = StageLayout::of(p.weight, S::kRows / kSlab, kGroups);
  StreamRing const ring{weights, weights.bytes + p.m * kStep * 2, split};
  int const shared_bytes = std::max(S::kWarps * S::kStages * ring.bytes, S::kSumBytes);
  launch_kernel(stream_kernel<S, CudaType<kX>>, prepared, p, ring, ceil_div(p.weight.n, S::kRows), S::kThreads,
                shared_bytes, device, stream);
}

template <int kRow, DType kX, int kBits, int kGroups>
void launch_tiled(Problem const& p, int split, int device, Stream stream) {
  constexpr TiledConfig kConfig = kTiledRows[kRow];
  using S = Tiled<CudaType<kX>, kBits, kGroups, kConfig.warps, kConfig.tokens, kConfig.stages(kBits)>;
  static PerDevice prepared;
  TiledRing const ring{StageLayout::of(p.weight, S::kSlabs, kGroups), split, ceil_div(p.m, S::kTokens)};
  int const shared_bytes = std::max(S::kStages * S::stage_bytes(ring.weights), S::kSumBytes);
  launch_kernel(tiled_kernel<S, CudaType<kX>>, prepared, p, ring, ceil_div(p.weight.n, S::kRows) * ring.token_tiles,
                S::kThreads, shared_bytes, device, stream);
}

}  // namespace epiloq::ops::weight_only_mm
