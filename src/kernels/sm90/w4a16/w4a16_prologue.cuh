#pragma once

// SM90: how a block whose steps TMA copies begins, and the warp that asks for them. The others are told apart by
// `warp`, from the first that may copy on.

#include <cutlass/arch/reg_reconfig.h>

#include "kernels/common/ptx/cluster.cuh"
#include "kernels/common/ptx/tma.cuh"
#include "kernels/sm90/w4a16/w4a16_producer.cuh"

namespace epiloq::ops::weight_only_mm {

// By one thread; the first tile's first weights have been asked for.
template <class C, bool kHasZeros>
__device__ __forceinline__ void copy_tiles(typename C::Params const& params, typename C::Shared const& shared,
                                           SharedAddress stages, typename C::Copies& first) {
  pdl_wait();
  first.issue_early_tokens(stages, shared);
  DecodePlace ring{0, 1};  // the first wait for each stage passes
  ring.advance(params.stages, first.early());
  first.template issue_all<kHasZeros>(stages, shared, ring, first.early());
  if constexpr (!C::kTakesMore) return;
#pragma unroll 1
  for (int tile = blockIdx.x + gridDim.x; tile < params.tiles; tile += gridDim.x) {
    typename C::Copies(params, tile).template issue_all<kHasZeros>(stages, shared, ring);
  }
}

template <class C>
__device__ __forceinline__ void wait_for_math_warps() {
  asm volatile("bar.sync 1, %0;" ::"n"(C::kConsumerThreads) : "memory");
}

// That the barriers are there the first copying warp says, which goes on, and the warps that multiply wait for.
template <class C>
__device__ __forceinline__ void say_started() {
  asm volatile("bar.arrive 0, %0;" ::"n"(C::kConsumerThreads + 32) : "memory");
}
template <class C>
__device__ __forceinline__ void wait_for_start() {
  asm volatile("bar.sync 0, %0;" ::"n"(C::kConsumerThreads + 32) : "memory");
}

// What waits behind the start of a block's copies, where there is one: the next kernel, and registers.
template <class C>
__device__ __forceinline__ void have_started(bool is_split) {
  if (!C::kLendsRing && is_split) cluster_arrive();
  pdl_trigger();
  if constexpr (C::kSharesRegisters) cutlass::arch::warpgroup_reg_dealloc<C::kCopyRegisters>();
}

// All blocks of a GPU start together, and memory does nothing until they ask: weights come before all else that there
// is to do. The elected lane's branches have no other condition, or nvcc would put a loop around each of TMA's copies;
// and registers are given back in one place, as all four warps must do it together.
template <class C>
__device__ __forceinline__ void start_and_copy(typename C::Params const& params, typename C::Shared const& shared,
                                               SharedAddress stages, int warp) {
  bool const is_split = gridDim.y > 1, elect_one = gemm::elect_one();
  typename C::Copies first(params, blockIdx.x);
  if (warp == 0) {
    if (elect_one) {
      shared.init_early();
      first.issue_early_weights(stages, shared);
      shared.init_others();
    }
    __syncwarp();
    say_started<C>();
  }
  have_started<C>(is_split);
  if (warp == 0) {
    if (elect_one) {
      // A branch within the loop would take registers of each step's addresses.
      if (params.zero_bytes > 0) {
        copy_tiles<C, true>(params, shared, stages, first);
      } else {
        copy_tiles<C, false>(params, shared, stages, first);
      }
    }
  }
  __syncwarp();
  if (!C::kLendsRing && is_split) cluster_wait();  // as the others do
}

}  // namespace epiloq::ops::weight_only_mm
