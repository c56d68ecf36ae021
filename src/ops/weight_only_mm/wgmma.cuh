#pragma once

// SM90, from some ten tokens on: weights are the rows of wgmma's tile, through registers, and tokens its columns. One
// thread copies with TMA into a ring of steps of 128 columns; the warpgroups of a block multiply 64 or twice 64 weight
// rows each by all of its tokens, and while one makes fragments or adds up, others keep the tensor cores busy. Blocks
// of a cluster may share K.

#include <cutlass/arch/reg_reconfig.h>

#include "ops/weight_only_mm/finish.cuh"
#include "ops/weight_only_mm/wgmma_math.cuh"

namespace epiloq::ops::weight_only_mm {

template <class C>
__device__ __forceinline__ void wait_for_teams() {
  asm volatile("bar.sync 1, %0;" ::"n"(C::kMathThreads) : "memory");
}

template <class C>
__device__ void multiply_tile(WgmmaParams const& params, typename C::Shared const& shared, unsigned char* stages,
                              typename C::Place const& place) {
  int const team = __shfl_sync(~0u, threadIdx.x / C::kTeamThreads, 0);
  int const warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
  WgmmaMath<C> const math(params, team, warp);
  wait_for_previous_kernel();
  typename WgmmaMath<C>::Sums sums = {};
  math.multiply_all(sums, shared, stages, place.steps);
  wait_for_teams<C>();  // the ring makes room for the sums
  auto* const all_sums = reinterpret_cast<float*>(stages);
  math.store(all_sums, sums);
  wait_for_teams<C>();
  if (gridDim.y > 1) wait_for_cluster();
  finish_rows<typename C::T, C::kRows, C::kTokens, C::kMathThreads>(params.p, all_sums, place.first_slab * kSlab,
                                                                    place.first_token, blockIdx.y, gridDim.y);
  if (gridDim.y > 1) wait_for_cluster();  // others may still read this block's sums
}

// Blocks along x take tiles of tokens, along y they share K, along z they take rows.
template <class C>
__global__ __launch_bounds__(C::kThreads, 1) void wgmma_kernel(__grid_constant__ WgmmaParams const params) {
  extern __shared__ unsigned char memory[];
  __shared__ std::uint64_t barriers[kBarrierBytes / 8];
  typename C::Shared const shared(barriers);
  unsigned char* const stages = memory + (kAtom - shared_address(memory) % kAtom) % kAtom;
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  let_next_kernel_start();
  typename C::Place const place(params.p.weight);
  if (threadIdx.x >= C::kMathThreads) {
    cutlass::arch::warpgroup_reg_dealloc<C::kCopyRegisters>();
    if (threadIdx.x == C::kMathThreads) {
      typename C::Copies const copies{params, place};
      copies.prefetch();
      wait_for_previous_kernel();
      copies.ask_for_all(stages, shared);
    }
    if (gridDim.y > 1) {  // where the others wait
      wait_for_cluster();
      wait_for_cluster();
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<C::kMathRegisters>();
    multiply_tile<C>(params, shared, stages, place);
  }
}

}  // namespace epiloq::ops::weight_only_mm
