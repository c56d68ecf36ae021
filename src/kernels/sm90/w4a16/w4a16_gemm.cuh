#pragma once

// SM90 W4A16/W8A16 WGMMA GEMM: weights are the rows of wgmma's tile, dequantised in registers, and tokens its columns.
// One producer thread loads K steps of 128 with TMA; consumer warpgroups multiply 64 or 128 weight rows each by all
// tokens, along rows and along K, and keep the tensor cores busy while others dequantise or promote. Persistent over
// tiles; or the CTAs of a cluster split the K of one.

#include "kernels/common/w4a16/epilogue.cuh"
#include "kernels/sm90/w4a16/w4a16_mainloop.cuh"
#include "kernels/sm90/w4a16/w4a16_prologue.cuh"
#include "kernels/sm90/w4a16/w4a16_split_k.cuh"

namespace epiloq::ops::weight_only_mm {

// Tiles of two blocks are not in bands: their sums leave no registers for that.
template <class T_, int kBits_, int kGroups_, int kMGroups_, int kKGroups_, int kBlocks_, int kTokens_, bool kRounds_,
          class Tokens_ = MatrixTokens, class X_ = T_>
struct Wgmma : TileCopies<kBits_, kGroups_, 64 * kMGroups_ * kBlocks_, kTokens_, most_stages(WgmmaConfig{}),
                          4 * kMGroups_, Tokens_, kBlocks_ == 1> {
  using T = T_;  // of the output
  using X = X_;  // of tokens
  static constexpr int kMGroups = kMGroups_, kKGroups = kKGroups_, kBlocks = kBlocks_;
  static constexpr bool kRounds = kRounds_, kIsPersistent = true;
  static constexpr int kWarpgroupThreads = 128, kKGroupThreads = kMGroups * kWarpgroupThreads,
                       kConsumerWarpgroups = kMGroups * kKGroups;
  static constexpr int kConsumerThreads = kConsumerWarpgroups * kWarpgroupThreads;
  // One producer warp; or a whole producer warpgroup if registers are to be reallocated, which costs 300 cycles at
  // start. A single consumer warpgroup already has as many registers as an instruction can address.
  static constexpr bool kReallocatesRegisters = kConsumerWarpgroups > 1;
  static constexpr int kProducerThreads = kReallocatesRegisters ? kWarpgroupThreads : 32,
                       kThreads = kConsumerThreads + kProducerThreads;
  // The producer keeps at least 32 registers if that costs the consumers none.
  static constexpr int kEqualRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kProducerRegisters =
      kConsumerWarpgroups < 6 && Tokens_::kProducerRegisters < 32 ? 32 : Tokens_::kProducerRegisters;
  static constexpr int kConsumerRegisters =
      (kEqualRegisters + (kEqualRegisters - kProducerRegisters) / kConsumerWarpgroups) / 8 * 8;

  static constexpr bool kReducesInStages = reduces_in_stages(kKGroups, kTokens_);  // if CTAs split K
};

// Epilogue of a CTA: reduces the sums of its K groups into the first.
template <class C>
__device__ void reduce_k_groups(typename WgmmaMainloop<C>::Sums& sums, float* exchange, int k_group) {
  constexpr int kFloats = C::kRows * C::kTokens;  // per K group
  exchange += threadIdx.x % C::kKGroupThreads;
  sync_consumers<C>();  // the last tile's sums have been read
  if (k_group > 0) WgmmaMainloop<C>::write(sums, exchange + (k_group - 1) * kFloats);
  sync_consumers<C>();
  if (k_group > 0) return;
#pragma unroll
  for (int other = 1; other < C::kKGroups; ++other) WgmmaMainloop<C>::add(sums, exchange + (other - 1) * kFloats);
}

template <class C>
__device__ void multiply_tiles(TileParams const& params, typename C::Shared const& shared, unsigned char* stages,
                               int group, int warp) {
  int const k_group = group / C::kMGroups;
  WgmmaMainloop<C> const mainloop(params, group % C::kMGroups, warp);
  if (!C::kReducesInStages && gridDim.y > 1) cluster_wait();
  pdl_wait();
  SharedAddress const full = warp_uniform(shared.full), empty = warp_uniform(shared.empty);
  SharedAddress const first_stage = warp_uniform(shared_address(stages));
  gemm::DynamicPipelineState state{0, 0};
  state.advance(params.stages, k_group);
  int next_step = k_group;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < params.tiles; tile += gridDim.x) {
    typename C::WorkTile const work(params, tile);
    typename WgmmaMainloop<C>::Sums sums = {};
    mainloop.multiply_all(sums, full, empty, first_stage, work.steps, next_step, state);
    // Has its own stores: sharing them would make ptxas keep the pipeline position in vector registers.
    if (gridDim.y > 1) return SplitKEpilogue<C>(params, mainloop, shared.received, first_stage).store(sums, work);
    if constexpr (C::kKGroups > 1)
      reduce_k_groups<C>(sums, reinterpret_cast<float*>(stages + params.exchange_at), k_group);
    if (k_group == 0) mainloop.store_directly(work, sums);
  }
}

// CTAs along x loop over tiles, loading the next while one is stored; along y they split K.
template <class C>
__global__ __launch_bounds__(C::kThreads, 1) void wgmma_kernel(__grid_constant__ typename C::Params const params) {
  extern __shared__ unsigned char memory[];
  __shared__ std::uint64_t barriers[barrier_bytes(C::kMostStages) / 8];
  typename C::Shared const shared(barriers);
  unsigned char* const stages = memory + padding_to_atom(shared_address(memory));
  int const group = warp_uniform(threadIdx.x / C::kWarpgroupThreads), warp = warp_uniform(threadIdx.x / 32 % 4);
  if (group == C::kConsumerWarpgroups) return run_producer<C>(params, shared, shared_address(stages), warp);
  if (threadIdx.x < 32 && gemm::elect_one()) prefetch_maps(params);
  bool const is_split = gridDim.y > 1;
  if (is_split && threadIdx.x == 0) {
    int const token_groups = token_groups_of<C>(typename C::WorkTile(params, blockIdx.x), params.tokens);
    SubtileReduction(blockIdx.y, gridDim.y, shared.received, 0).expect(token_groups * C::kPanels);
  }
  wait_for_start<C>();
  if (!C::kReducesInStages && is_split) cluster_arrive();
  pdl_trigger();
  if constexpr (C::kReallocatesRegisters) cutlass::arch::warpgroup_reg_alloc<C::kConsumerRegisters>();
  multiply_tiles<C>(params, shared, stages, group, warp);
}

}  // namespace epiloq::ops::weight_only_mm
