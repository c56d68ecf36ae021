#pragma once

// Prologue of the TMA-fed weight-only kernels, and the producer warp. Roles follow from `warp`, counted from the first
// warp that may copy.

#include <cutlass/arch/reg_reconfig.h>

#include "kernels/common/ptx/cluster.cuh"
#include "kernels/common/ptx/cta.cuh"
#include "kernels/common/ptx/tma.cuh"
#include "kernels/sm90/w4a16/w4a16_producer.cuh"

namespace epiloq::ops::weight_only_mm {

// One thread; the first tile's first weights have been issued.
template <class C, bool kHasZeros>
__device__ __forceinline__ void load_tiles(typename C::Params const& params, typename C::Shared const& shared,
                                           SharedAddress stages, typename C::Copies& first) {
  pdl_wait();
  first.issue_early_tokens(stages, shared);
  gemm::DynamicPipelineState state{0, 1};  // the first wait for each stage passes
  state.advance(params.stages, first.early());
  first.template issue_all<kHasZeros>(stages, shared, state, first.early());
  if constexpr (!C::kIsPersistent) return;
#pragma unroll 1
  for (int tile = blockIdx.x + gridDim.x; tile < params.tiles; tile += gridDim.x) {
    typename C::Copies(params, tile).template issue_all<kHasZeros>(stages, shared, state);
  }
}

template <class C>
__device__ __forceinline__ void sync_consumers() {
  named_barrier_sync<1, C::kConsumerThreads>();
}

// The first producer warp signals that the barriers are initialised, without waiting; consumer warps wait.
template <class C>
__device__ __forceinline__ void arrive_started() {
  asm volatile("bar.arrive 0, %0;" ::"n"(C::kConsumerThreads + 32) : "memory");
}
template <class C>
__device__ __forceinline__ void wait_for_start() {
  named_barrier_sync<0, C::kConsumerThreads + 32>();
}

// The rest of the prologue, after the first copies: PDL trigger and register reallocation.
template <class C>
__device__ __forceinline__ void finish_prologue(bool is_split) {
  if (!C::kReducesInStages && is_split) cluster_arrive();
  pdl_trigger();
  if constexpr (C::kReallocatesRegisters) cutlass::arch::warpgroup_reg_dealloc<C::kProducerRegisters>();
}

// All CTAs start together and memory idles until the first load, so weights are issued first. The elected lane's
// branches have no other condition, or nvcc puts a loop around each copy; registers are released in one place, as all
// four warps must do it together.
template <class C>
__device__ __forceinline__ void run_producer(typename C::Params const& params, typename C::Shared const& shared,
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
    arrive_started<C>();
  }
  finish_prologue<C>(is_split);
  if (warp == 0) {
    if (elect_one) {
      // A branch inside the loop would cost registers for each step's addresses.
      if (params.zero_bytes > 0) {
        load_tiles<C, true>(params, shared, stages, first);
      } else {
        load_tiles<C, false>(params, shared, stages, first);
      }
    }
  }
  __syncwarp();
  if (!C::kReducesInStages && is_split) cluster_wait();  // as the other warps do
}

}  // namespace epiloq::ops::weight_only_mm
