#pragma once

// SM90, for all but the fewest tokens: weights are the rows of wgmma's tile, through registers, and tokens its columns.
// One thread copies with TMA into a ring of steps of 128 columns; the warpgroups of a block multiply 64 or twice 64
// weight rows each by all of its tokens, some of them every step, or each way along K every so many; and while one
// makes fragments or adds up, others keep the tensor cores busy. A block takes tile after tile; or the blocks of a
// cluster share the K of one.

#include "kernels/common/w4a16/epilogue.cuh"
#include "kernels/sm90/w4a16/w4a16_mainloop.cuh"
#include "kernels/sm90/w4a16/w4a16_prologue.cuh"
#include "kernels/sm90/w4a16/w4a16_split_k.cuh"

namespace epiloq::ops::weight_only_mm {

template <class T_, int kBits_, int kGroups_, int kMGroups_, int kKGroups_, int kBlocks_, int kTokens_, bool kRounds_,
          class Tokens_ = MatrixTokens>
struct Wgmma : TileCopies<kBits_, kGroups_, 64 * kMGroups_ * kBlocks_, kTokens_, most_stages(WgmmaConfig{}),
                          4 * kMGroups_, Tokens_> {
  using T = T_;
  static constexpr int kMGroups = kMGroups_, kKGroups = kKGroups_, kBlocks = kBlocks_;
  static constexpr bool kRounds = kRounds_, kTakesMore = true;
  static constexpr int kTeamThreads = 128, kKGroupThreads = kMGroups * kTeamThreads,
                       kConsumerTeams = kMGroups * kKGroups;
  static constexpr int kConsumerThreads = kConsumerTeams * kTeamThreads;
  // Beside them one warp copies; or four, as many as can give registers away, which takes 300 cycles of a block's
  // start. One team alone has as many as an instruction can name.
  static constexpr bool kSharesRegisters = kConsumerTeams > 1;
  static constexpr int kCopyThreads = kSharesRegisters ? kTeamThreads : 32, kThreads = kConsumerThreads + kCopyThreads;
  // Of those that copy at least 32 where that costs the others none.
  static constexpr int kEqualRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kCopyRegisters =
      kConsumerTeams < 6 && Tokens_::kCopyRegisters < 32 ? 32 : Tokens_::kCopyRegisters;
  static constexpr int kConsumerRegisters =
      (kEqualRegisters + (kEqualRegisters - kCopyRegisters) / kConsumerTeams) / 8 * 8;

  static constexpr bool kLendsRing = lends_ring(kKGroups, kTokens_);  // where blocks share K
};

// The sums of a block, to the first of its ways along K.
template <class C>
__device__ void reduce_k_groups(typename WgmmaMainloop<C>::Sums& sums, float* exchange, int k_group) {
  constexpr int kFloats = C::kRows * C::kTokens;  // of a way
  exchange += threadIdx.x % C::kKGroupThreads;
  wait_for_math_warps<C>();  // those of the last tile have been read
  if (k_group > 0) WgmmaMainloop<C>::write(sums, exchange + (k_group - 1) * kFloats);
  wait_for_math_warps<C>();
  if (k_group > 0) return;
#pragma unroll
  for (int other = 1; other < C::kKGroups; ++other) WgmmaMainloop<C>::add(sums, exchange + (other - 1) * kFloats);
}

template <class C>
__device__ void multiply_tiles(TileParams const& params, typename C::Shared const& shared, unsigned char* stages,
                               int group, int warp) {
  int const k_group = group / C::kMGroups;
  WgmmaMainloop<C> const math(params, group % C::kMGroups, warp);
  if (!C::kLendsRing && gridDim.y > 1) cluster_wait();
  pdl_wait();
  SharedAddress const full = warp_uniform(shared.full), empty = warp_uniform(shared.empty);
  SharedAddress const first_stage = warp_uniform(shared_address(stages));
  DecodePlace ring{0, 0};
  ring.advance(params.stages, k_group);
  int next_step = k_group;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < params.tiles; tile += gridDim.x) {
    typename C::Place const place(params, tile);
    typename WgmmaMainloop<C>::Sums sums = {};
    math.multiply_all(sums, full, empty, first_stage, place.steps, next_step, ring);
    // With its own stores, or ptxas would keep the ring's place in vector registers.
    if (gridDim.y > 1) return ClusterEnd<C>(params, math, shared.received, first_stage).store(sums, place);
    if constexpr (C::kKGroups > 1)
      reduce_k_groups<C>(sums, reinterpret_cast<float*>(stages + params.exchange_at), k_group);
    if (k_group == 0) math.store_directly(place, sums);
  }
}

// Blocks along x take tiles, and the next ones while the last is stored; along y they share K.
template <class C>
__global__ __launch_bounds__(C::kThreads, 1) void wgmma_kernel(__grid_constant__ typename C::Params const params) {
  extern __shared__ unsigned char memory[];
  __shared__ std::uint64_t barriers[barrier_bytes(C::kMostStages) / 8];
  typename C::Shared const shared(barriers);
  unsigned char* const stages = memory + (kAtom - shared_address(memory) % kAtom) % kAtom;
  int const group = warp_uniform(threadIdx.x / C::kTeamThreads), warp = warp_uniform(threadIdx.x / 32 % 4);
  if (group == C::kConsumerTeams) return start_and_copy<C>(params, shared, shared_address(stages), warp);
  if (threadIdx.x < 32 && gemm::elect_one()) prefetch_maps(params);
  bool const shares = gridDim.y > 1;
  if (shares && threadIdx.x == 0) {
    int const eights = eights_of<C>(typename C::Place(params, blockIdx.x), params.tokens);
    SubtileReduction(blockIdx.y, gridDim.y, shared.received, 0).expect(eights * C::kPanels);
  }
  wait_for_start<C>();
  if (!C::kLendsRing && shares) cluster_arrive();
  pdl_trigger();
  if constexpr (C::kSharesRegisters) cutlass::arch::warpgroup_reg_alloc<C::kConsumerRegisters>();
  multiply_tiles<C>(params, shared, stages, group, warp);
}

}  // namespace epiloq::ops::weight_only_mm
