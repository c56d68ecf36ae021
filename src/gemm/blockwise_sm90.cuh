#pragma once

// The product of blockwise.cuh for SM90 and blocks of 128, for many tokens: weights first, so that D^T is computed.
//
// A thread block stays on its SM and takes tile after tile of 128 weight rows. Two threads copy with TMA into a ring of
// stages of one block of K each; two groups of four warps multiply 64 weight rows each with wgmma. De-quantising the
// int32 sums takes longer than multiplying, so each group has two sets of them and adds up one while wgmma fills the
// other. 4-bit weights reach wgmma through registers, and leave room for two sets of 64 tokens.
//
// What limits it (H200, 2026-11-21): a conversion, a product and two multiply-adds for each sum, which with what goes
// with them fill half of the issue slots. Without any copies a block of K takes as long, and four groups of 64 x 64,
// each with one set, take 8 to 11 % longer.

#include <algorithm>

#include "core/cuda_check.h"
#include "core/device_code.cuh"
#include "cutlass/arch/reg_reconfig.h"
#include "epiloq/device.h"
#include "gemm/blockwise_sm90_math.cuh"
#include "gemm/params_cache.h"

namespace epiloq::gemm {

template <class K>
__global__ __launch_bounds__(K::kThreads,
                             1) void blockwise_sm90_kernel(__grid_constant__ BlockwiseSm90Params const params) {
  extern __shared__ unsigned char memory[];
  typename K::Shared const shared(memory);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < K::kStages; ++stage) {
      shared.full[stage].init(K::kCopyingThreads);
      shared.empty[stage].init(K::kGroups * K::kGroupThreads / 32);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  let_next_kernel_start();
  int const group = uniform(threadIdx.x / K::kGroupThreads);
  if (group == K::kGroups) {
    cutlass::arch::warpgroup_reg_dealloc<K::kCopyRegisters>();
    int const warp = uniform(threadIdx.x % K::kGroupThreads / 32);
    if (warp < K::kCopyingThreads && is_elected()) {
      // Weights need not wait for the quantising kernel: it waited for whoever wrote them before it let this one start.
      bool const of_weights = warp == 0;
      if (!of_weights) wait_for_previous_kernel();
      K::copy_all(shared, params, of_weights);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<K::kProductRegisters>();
    K::multiply_all(params.p, shared, params.p.k / K::kStep, group);
  }
}

template <int kTokens, int kBits>
struct BlockwiseSm90Gemm {
  using K = BlockwiseSm90<kTokens, kBits>;

  static void launch(BlockwiseProblem const& p, int device, Stream stream) {
    auto* const kernel = blockwise_sm90_kernel<K>;
    static PerDevice prepared;
    prepared.once(device, [kernel] {
      cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, K::kSharedBytes),
                 "asking for shared memory");
    });
    thread_local ParamsCache<BlockwiseProblem, BlockwiseSm90Params> cache;
    auto const& params = cache.get(cache_key(p.a, p.b, p.out), p, device, [&] { return K::params_of(p); });
    int const blocks = std::min(K::tiles(p), device_properties(device).sm_count);
    cuda_check(launch_dependent(kernel, blocks, K::kThreads, K::kSharedBytes, stream, params),
               "launching epiloq.online_quant_mm");
  }
};

}  // namespace epiloq::gemm
