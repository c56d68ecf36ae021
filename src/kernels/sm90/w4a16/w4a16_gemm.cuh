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

template <class T_, int kBits_, int kGroups_, int kTeams_, int kWays_, int kBlocks_, int kTokens_, bool kRounds_,
          class Tokens_ = MatrixTokens>
struct Wgmma : TileCopies<kBits_, kGroups_, 64 * kTeams_ * kBlocks_, kTokens_, most_stages(WgmmaConfig{}), 4 * kTeams_,
                          Tokens_> {
  using T = T_;
  static constexpr int kTeams = kTeams_, kWays = kWays_, kBlocks = kBlocks_;
  static constexpr bool kRounds = kRounds_, kTakesMore = true;
  static constexpr int kTeamThreads = 128, kWayThreads = kTeams * kTeamThreads, kMathTeams = kTeams * kWays;
  static constexpr int kMathThreads = kMathTeams * kTeamThreads;
  // Beside them one warp copies; or four, as many as can give registers away, which takes 300 cycles of a block's
  // start. One team alone has as many as an instruction can name.
  static constexpr bool kSharesRegisters = kMathTeams > 1;
  static constexpr int kCopyThreads = kSharesRegisters ? kTeamThreads : 32, kThreads = kMathThreads + kCopyThreads;
  // Of those that copy at least 32 where that costs the others none.
  static constexpr int kEqualRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kCopyRegisters = kMathTeams < 6 && Tokens_::kCopyRegisters < 32 ? 32 : Tokens_::kCopyRegisters;
  static constexpr int kMathRegisters = (kEqualRegisters + (kEqualRegisters - kCopyRegisters) / kMathTeams) / 8 * 8;

  static constexpr bool kLendsRing = lends_ring(kWays, kTokens_);  // where blocks share K
};

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

template <class C>
__device__ void multiply_tiles(TileParams const& params, typename C::Shared const& shared, unsigned char* stages,
                               int group, int warp) {
  int const way = group / C::kTeams;
  WgmmaMath<C> const math(params, group % C::kTeams, warp);
  if (!C::kLendsRing && gridDim.y > 1) wait_for_ready();
  wait_for_previous_kernel();
  SharedAddress const full = uniform(shared.full), empty = uniform(shared.empty);
  SharedAddress const first_stage = uniform(shared_address(stages));
  RingPlace ring{0, 0};
  ring.advance(params.stages, way);
  int next_step = way;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < params.tiles; tile += gridDim.x) {
    typename C::Place const place(params, tile);
    typename WgmmaMath<C>::Sums sums = {};
    math.multiply_all(sums, full, empty, first_stage, place.steps, next_step, ring);
    // With its own stores, or ptxas would keep the ring's place in vector registers.
    if (gridDim.y > 1) return ClusterEnd<C>(params, math, shared.received, first_stage).store(sums, place);
    if constexpr (C::kWays > 1) add_ways<C>(sums, reinterpret_cast<float*>(stages + params.exchange_at), way);
    if (way == 0) math.store_directly(place, sums);
  }
}

// Blocks along x take tiles, and the next ones while the last is stored; along y they share K.
template <class C>
__global__ __launch_bounds__(C::kThreads, 1) void wgmma_kernel(__grid_constant__ typename C::Params const params) {
  extern __shared__ unsigned char memory[];
  __shared__ std::uint64_t barriers[barrier_bytes(C::kMostStages) / 8];
  typename C::Shared const shared(barriers);
  unsigned char* const stages = memory + (kAtom - shared_address(memory) % kAtom) % kAtom;
  int const group = uniform(threadIdx.x / C::kTeamThreads), warp = uniform(threadIdx.x / 32 % 4);
  if (group == C::kMathTeams) return start_and_copy<C>(params, shared, shared_address(stages), warp);
  if (threadIdx.x < 32 && gemm::is_elected()) prefetch_maps(params);
  bool const shares = gridDim.y > 1;
  if (shares && threadIdx.x == 0) {
    int const eights = eights_of<C>(typename C::Place(params, blockIdx.x), params.tokens);
    PieceShare(blockIdx.y, gridDim.y, shared.received, 0).expect(eights * C::kSlabs);
  }
  wait_for_start<C>();
  if (!C::kLendsRing && shares) say_ready();
  let_next_kernel_start();
  if constexpr (C::kSharesRegisters) cutlass::arch::warpgroup_reg_alloc<C::kMathRegisters>();
  multiply_tiles<C>(params, shared, stages, group, warp);
}

}  // namespace epiloq::ops::weight_only_mm
