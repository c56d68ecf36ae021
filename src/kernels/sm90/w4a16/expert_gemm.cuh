#pragma once

// SM90: the weight-only WGMMA GEMM for a mixture of experts (grouped_packed_mm, packed_fp4_mm): 128 or 256 weight rows
// of an expert by one to four chunks of its tokens.

#include "kernels/common/ptx/wgmma.cuh"  // first: tiles of any multiple of 8 tokens
#include "kernels/sm90/w4a16/expert_tiles.cuh"
#include "kernels/sm90/w4a16/fp4_gemm.cuh"

namespace epiloq::ops::grouped_packed_mm {

// The kernel of a row of kExpertRows and a format: tiles of kTokens tokens, and what all have in common.
template <int kRow, class T_, Format kFormat>
struct ExpertFormat {
  using T = T_;
  static constexpr int kBits = bits_of(kFormat);
  static constexpr wo::WgmmaConfig kConfig = expert_config(kRow, kBits);
  template <int kTokens>
  using Tile = wo::Wgmma<T, kBits, groups_of(kFormat), kConfig.m_groups, kConfig.k_groups, kConfig.blocks, kTokens,
                         kConfig.rounds>;
};
template <int kRow, class T_, Format kFormat>
  requires(is_fp4(kFormat))
struct ExpertFormat<kRow, T_, kFormat> {
  using T = T_;
  static constexpr int kBits = bits_of(kFormat);
  static constexpr wo::WgmmaConfig kConfig = expert_config(kRow, kBits);
  template <int kTokens>
  using Tile = wo::Fp4Wgmma<T, typename FoldedOf<T, kFormat>::Type, groups_of(kFormat), kConfig.m_groups,
                            kConfig.k_groups, kTokens>;
};
template <int kRow, class T, Format kFormat>
struct ExpertWgmma : ExpertFormat<kRow, T, kFormat> {
  using Base = ExpertFormat<kRow, T, kFormat>;
  static constexpr int kChunkTokens = kExpertRows[kRow].chunk, kMostChunks = kExpertRows[kRow].chunks(Base::kBits);
};

// Multiplies and stores a tile of at most kChunks chunks.
template <class G, int kChunks>
__device__ __forceinline__ void multiply_expert_tile(ExpertParams const& params, ExpertPipeline& pipeline,
                                                     ExpertTile const& tile, int group, int warp) {
  if constexpr (kChunks > 1) {
    if (tile.chunks < kChunks) return multiply_expert_tile<G, kChunks - 1>(params, pipeline, tile, group, warp);
  }
  using Mainloop = wo::WgmmaMainloop<TileOf<G, kChunks>>;
  using T = typename G::T;
  Mainloop const mainloop(params, group, warp);
  typename Mainloop::Sums sums = {};
  int step = 0;
  mainloop.multiply_all(sums, pipeline.full, pipeline.empty, pipeline.stages, params.steps, step, pipeline.state);
  wo::Problem const product = product_of<T>(params, tile);
  float const unit = Mainloop::kUnit * factor_of(params, tile);
  wo::DirectRows<T> const rows(product, (tile.first_panel + mainloop.panel) * wo::kPanelRows);
#pragma unroll
  for (int i = 0; i < Mainloop::kSums; i += 4) rows.store(tile.first_token + i * 2, sums[0] + i, unit);
}

template <class G>
__global__ __launch_bounds__(TileOf<G>::kThreads, 1) void expert_kernel(__grid_constant__ ExpertParams const params) {
  using C = TileOf<G>;
  extern __shared__ unsigned char memory[];
  __shared__ ExpertShared shared;
  SharedAddress const start = shared_address(memory);
  SharedAddress const stages = start + wo::padding_to_atom(start);
  int const group = warp_uniform(threadIdx.x / C::kWarpgroupThreads), warp = warp_uniform(threadIdx.x / 32 % 4);
  if (threadIdx.x == 0) {
    wo::prefetch_maps(params);
    shared.init(params.stages, C::kConsumerThreads / 32);
  }
  __syncthreads();
  pdl_trigger();
  if (group == C::kConsumerWarpgroups) {
    cutlass::arch::warpgroup_reg_dealloc<C::kProducerRegisters>();
    if (warp == 0) ExpertProducer<G>(params, shared, stages).run();
  } else {
    cutlass::arch::warpgroup_reg_alloc<C::kConsumerRegisters>();
    ExpertPipeline pipeline(shared, stages);
    for_expert_tiles(shared, pipeline, [&](ExpertTile const& tile) {
      multiply_expert_tile<G, G::kMostChunks>(params, pipeline, tile, group, warp);
    });
  }
}

template <int kRow, DType kX, Format kFormat>
void launch_expert_wgmma(Problem const& p, int tiles, int, int device, Stream stream) {
  using G = ExpertWgmma<kRow, CudaType<kX>, kFormat>;
  launch_expert_tiles<G>(&expert_kernel<G>, p, tiles, 1, 0, device, stream);
}

}  // namespace epiloq::ops::grouped_packed_mm
