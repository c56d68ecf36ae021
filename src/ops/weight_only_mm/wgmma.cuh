#pragma once

// SM90, for all but the fewest tokens: weights are the rows of wgmma's tile, through registers, and tokens its columns.
// One thread copies with TMA into a ring of steps of 128 columns; the warpgroups of a block multiply 64 or twice 64
// weight rows each by all of its tokens, some of them every step, or each way along K every so many; and while one
// makes fragments or adds up, others keep the tensor cores busy. A block takes tile after tile; or the blocks of a
// cluster share the K of one.

#include <cutlass/arch/reg_reconfig.h>

#include "gemm/tma.cuh"
#include "ops/weight_only_mm/finish.cuh"
#include "ops/weight_only_mm/wgmma_math.cuh"
#include "ops/weight_only_mm/wgmma_share.cuh"

namespace epiloq::ops::weight_only_mm {

// The sums of a block, to the first of its ways along K.
template <class C>
__device__ void add_ways(typename WgmmaMath<C>::Sums& sums, float* exchange, int way) {
  constexpr int kFloats = C::kRows * C::kTokens;  // of a way
  exchange += threadIdx.x % C::kWayThreads;
  wait_for_math_warps<C>();  // those of the last tile have been read
  if (way > 0) WgmmaMath<C>::write(sums, exchange + (way - 1) * kFloats);
  wait_for_math_warps<C>();
  if (way > 0) return;
#pragma unroll
  for (int other = 1; other < C::kWays; ++other) WgmmaMath<C>::add(sums, exchange + (other - 1) * kFloats);
}

// Blocks of a cluster add their sums up in shared memory, in place of the ring; they have one tile each. Here of so
// many sums that what wgmma_share.cuh does, for each by its own code, would leave ptxas no registers for the loop.
template <class C>
__device__ void finish_together(WgmmaMath<C> const& math, typename WgmmaMath<C>::Sums const& sums,
                                WgmmaParams const& params, unsigned char* stages, typename C::Place const& place) {
  wait_for_math_warps<C>();  // the ring makes room for the sums
  auto* const all_sums = reinterpret_cast<float*>(stages);
  math.store(all_sums, sums);
  wait_for_math_warps<C>();
  wait_for_cluster();
  finish_rows<typename C::T, C::kRows, C::kTokens, C::kMathThreads>(params.p, all_sums, place.first_slab * kSlab,
                                                                    place.first_token, blockIdx.y, gridDim.y);
  wait_for_cluster();  // others may still read this block's sums
}

template <class C>
__device__ void multiply_tiles(WgmmaParams const& params, typename C::Shared const& shared, unsigned char* stages,
                               int group, int warp) {
  int const way = group / C::kTeams;
  WgmmaMath<C> const math(params, group % C::kTeams, warp);
  if (C::kSendsSums && gridDim.y > 1) wait_for_ready();
  wait_for_previous_kernel();
  SharedAddress const full = uniform(shared_address(shared.full)), empty = uniform(shared_address(shared.empty));
  SharedAddress const first_stage = uniform(shared_address(stages));
  RingPlace ring{0, 0};
  ring.advance(params.stages, way);
  int next_step = way;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < params.tiles; tile += gridDim.x) {
    typename C::Place const place(params, tile);
    typename WgmmaMath<C>::Sums sums = {};
    math.multiply_all(sums, full, empty, first_stage, place.steps, next_step, ring);
    if (gridDim.y > 1) {
      if constexpr (C::kSendsSums) {
        // What stores stands here again, or ptxas would keep the ring's place in vector registers.
        ClusterEnd<C> const end(params, math, shared_address(shared.received), first_stage);
        unsigned const whole = end.meet(sums[0], place);
        math.store_directly(place, sums, [&](int eight) { return whole >> eight & 1; });
      } else {
        finish_together<C>(math, sums, params, stages, place);
      }
      return;
    }
    if constexpr (C::kWays > 1) add_ways<C>(sums, reinterpret_cast<float*>(stages + params.exchange_at), way);
    if (way == 0) math.store_directly(place, sums, [](int) { return true; });
  }
}

// By one thread; the first tile's first weights have been asked for.
template <class C>
__device__ __forceinline__ void copy_tiles(typename C::Params const& params, typename C::Shared const& shared,
                                           unsigned char* stages, typename C::Copies& first) {
  wait_for_previous_kernel();
  first.ask_for_early_tokens(stages, shared);
  RingPlace ring{0, 1};  // the first wait for each stage passes
  ring.advance(params.stages, first.early());
  first.ask_for_all(stages, shared, ring, first.early());
#pragma unroll 1
  for (int tile = blockIdx.x + gridDim.x; tile < params.tiles; tile += gridDim.x) {
    typename C::Copies(params, tile).ask_for_all(stages, shared, ring);
  }
}

// That the barriers are there the first copying warp says, which goes on, and the warps that multiply wait for.
template <class C>
__device__ __forceinline__ void say_started() {
  asm volatile("bar.arrive 0, %0;" ::"n"(C::kMathThreads + 32) : "memory");
}
template <class C>
__device__ __forceinline__ void wait_for_start() {
  asm volatile("bar.sync 0, %0;" ::"n"(C::kMathThreads + 32) : "memory");
}

// What waits behind the start of a block's copies, where there is one: the next kernel, and registers.
template <class C>
__device__ __forceinline__ void have_started(bool is_shared) {
  if (C::kSendsSums && is_shared) say_ready();
  let_next_kernel_start();
  if constexpr (C::kSharesRegisters) cutlass::arch::warpgroup_reg_dealloc<C::kCopyRegisters>();
}

// All blocks of a GPU start together, and memory does nothing until they ask: weights come before all else that there
// is to do. The elected lane's branches have no other condition, or nvcc would put a loop around each of TMA's copies;
// and registers are given back in one place, as all four warps must do it together.
template <class C>
__device__ __forceinline__ void start_and_copy(typename C::Params const& params, typename C::Shared const& shared,
                                               unsigned char* stages, int warp) {
  bool const is_shared = gridDim.y > 1, is_elected = gemm::is_elected();
  typename C::Copies first(params, blockIdx.x);
  if (warp == 0) {
    if (is_elected) {
      shared.init_early();
      first.ask_for_early_weights(stages, shared);
      shared.init_others();
    }
    __syncwarp();
    say_started<C>();
  }
  have_started<C>(is_shared);
  if (warp == 0) {
    if (is_elected) copy_tiles<C>(params, shared, stages, first);
  }
  __syncwarp();
  if (!is_shared) return;
  if constexpr (C::kSendsSums) {  // where the others wait
    wait_for_ready();
  } else {
    wait_for_cluster();
    wait_for_cluster();
  }
}

// Blocks along x take tiles, and the next ones while the last is stored; along y they share K.
template <class C>
__global__ __launch_bounds__(C::kThreads,
                             C::kResident) void wgmma_kernel(__grid_constant__ typename C::Params const params) {
  extern __shared__ unsigned char memory[];
  __shared__ std::uint64_t barriers[kBarrierBytes / 8];
  typename C::Shared const shared(barriers);
  unsigned char* const stages = memory + (kAtom - shared_address(memory) % kAtom) % kAtom;
  int const group = uniform(threadIdx.x / C::kTeamThreads), warp = uniform(threadIdx.x / 32 % 4);
  if (group == C::kMathTeams) return start_and_copy<C>(params, shared, stages, warp);
  if (threadIdx.x < 32 && gemm::is_elected()) prefetch_maps(params);
  bool const sends = C::kSendsSums && gridDim.y > 1;
  if constexpr (C::kSendsSums) {
    using End = ClusterEnd<C>;
    if (sends && threadIdx.x == 0) {
      End::share_of(params, shared_address(shared.received), shared_address(stages))
          .expect(End::pieces_of(typename C::Place(params, blockIdx.x), params.tokens));
    }
  }
  wait_for_start<C>();
  if (sends) say_ready();
  let_next_kernel_start();
  if constexpr (C::kSharesRegisters) cutlass::arch::warpgroup_reg_alloc<C::kMathRegisters>();
  multiply_tiles<C>(params, shared, stages, group, warp);
}

}  // namespace epiloq::ops::weight_only_mm
