#pragma once

// Launches of the mma.sync weight-only kernels.

#include <algorithm>

#include "core/ceil_div.h"
#include "core/cuda_check.h"
#include "epiloq/device.h"
#include "kernels/common/occupancy.h"
#include "kernels/sm80/w4a16_gemv.cuh"

namespace epiloq::ops::weight_only_mm {

// The CTAs along y are a cluster. `launching`: for error messages.
template <class P, class Layout>
void launch_kernel(void (*kernel)(P, Layout), PerDevice& prepared, char const* launching, P const& p,
                   Layout const& layout, dim3 grid, int threads, int shared_bytes, int device, Stream stream) {
  prepared.allow_shared(kernel, device_properties(device).shared_memory_per_block, device);
  cuda_check(launch_pdl_clusters(kernel, grid, dim3(1, grid.y), threads, shared_bytes, stream, p, layout), launching);
}

// A Gemv with kGroups scale groups per K step; `factor` multiplies all sums of FP4 weights, null is 1.
template <class S, class T, int kGroups>
void launch_gemv_kernel(char const* launching, Problem const& p, float const* factor, int split, int device,
                        Stream stream) {
  using Products = typename S::Products;
  static PerDevice prepared;
  StageLayout const weights = StageLayout::of(p.weight, S::kRows / kPanelRows, kGroups);
  GemvPipeline const pipeline{weights,
                              weights.bytes + Products::token_bytes(p.m),
                              S::kStages,
                              Products::scratch_bytes(p.m),
                              gemv_received_bytes(p.m, S::kRows, split),
                              factor};
  dim3 const grid(static_cast<unsigned>(ceil_div(p.weight.n, S::kRows)), split);
  int const own_bytes = pipeline.received + std::max(S::kWarps * pipeline.warp_bytes(), S::kSumBytes);
  // Spread over the SMs where kernels overlap.
  DeviceProperties const& properties = device_properties(device);
  int const shared_bytes = properties.compute_capability < 90
                               ? own_bytes
                               : smem_that_spreads(own_bytes, std::int64_t{grid.x} * grid.y, properties.sm_count,
                                                   properties.shared_memory_per_block);
  launch_kernel(gemv_kernel<S, T>, prepared, launching, p, pipeline, grid, S::kThreads, shared_bytes, device, stream);
}

}  // namespace epiloq::ops::weight_only_mm
