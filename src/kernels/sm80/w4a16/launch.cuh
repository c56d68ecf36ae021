#pragma once

// Launches of the mma.sync weight-only kernels.

#include <algorithm>

#include "core/ceil_div.h"
#include "core/cuda_check.h"
#include "epiloq/device.h"
#include "kernels/common/occupancy.h"
#include "kernels/sm80/w4a16/gemv.cuh"

namespace epiloq::ops::weight_only_mm {

// The CTAs along y are a cluster. `launching`: for error messages.
template <class P, class Layout>
void launch_kernel(void (*kernel)(P, Layout), PerDevice& prepared, char const* launching, P const& p,
                   Layout const& layout, dim3 grid, int threads, int shared_bytes, int device, Stream stream) {
  prepared.allow_shared(kernel, device_properties(device).shared_memory_per_block, device);
  cuda_check(launch_pdl_clusters(kernel, grid, dim3(1, grid.y), threads, shared_bytes, stream, p, layout), launching);
}

// A warp's pipeline of a Gemv for at most so many tokens, with kGroups scale groups per K step; `factor` multiplies
// sums, null is 1.
template <class S, int kGroups>
GemvPipeline gemv_pipeline(Weight const& weight, int tokens, int split, float const* factor) {
  using Products = typename S::Products;
  StageLayout const weights = StageLayout::of(weight, S::kRows / kPanelRows, kGroups);
  return {weights,
          weights.bytes + Products::token_bytes(tokens),
          S::kStages,
          Products::scratch_bytes(tokens),
          gemv_received_bytes(tokens, S::kRows, split),
          factor};
}

// Shared memory of its CTAs, the first `reserved` bytes included: those that spread over the SMs where kernels overlap.
template <class S>
int gemv_shared_bytes(GemvPipeline const& pipeline, int reserved, dim3 grid, int device) {
  int const bytes = reserved + pipeline.received + std::max(S::kWarps * pipeline.warp_bytes(), S::kSumBytes);
  DeviceProperties const& properties = device_properties(device);
  if (properties.compute_capability < 90) return bytes;
  return smem_that_spreads(bytes, std::int64_t{grid.x} * grid.y, properties.sm_count,
                           properties.shared_memory_per_block);
}

template <class S, class T, int kGroups>
void launch_gemv_kernel(char const* launching, Problem const& p, float const* factor, int split, int device,
                        Stream stream) {
  static PerDevice prepared;
  GemvPipeline const pipeline = gemv_pipeline<S, kGroups>(p.weight, p.m, split, factor);
  dim3 const grid(static_cast<unsigned>(ceil_div(p.weight.n, S::kRows)), split);
  int const bytes = gemv_shared_bytes<S>(pipeline, 0, grid, device);
  launch_kernel(gemv_kernel<S, T>, prepared, launching, p, pipeline, grid, S::kThreads, bytes, device, stream);
}

}  // namespace epiloq::ops::weight_only_mm
