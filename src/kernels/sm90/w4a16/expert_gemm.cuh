#pragma once

// SM90: the weight-only WGMMA GEMM for a mixture of experts (grouped_packed_mm, packed_fp4_mm). A CTA tile is 128
// or 256 weight rows of an expert by one to four chunks of its tokens. Each number of chunks has a main loop of its
// own, so that a weight is converted once for all tokens of a tile, and few tokens are not multiplied as many.
//
// Persistent. The producer warp finds the tiles in a table of the experts' numbers of tiles, which it makes in shared
// memory, and passes each on through the pipeline, beside the tile's first stage.

#include <algorithm>

#include "kernels/common/ptx/wgmma.cuh"  // first: tiles of any multiple of 8 tokens
#include "kernels/launch/expert_wgmma.h"
#include "kernels/sm90/w4a16/fp4_gemm.cuh"

namespace epiloq::ops::grouped_packed_mm {

struct ExpertParams : wo::TileParams {
  int const* counts;
  int experts;
  bool masked;
  std::int64_t stride_out_expert;  // if they are masked
  float const* factor;             // of each expert's sums; null: 1
};

// An expert's rows of x. Counts are clamped to those that exist.
struct ExpertRows {
  int begin, count;

  static __device__ __forceinline__ ExpertRows of(ExpertParams const& params, int expert) {
    int const m = params.p.m;
    auto const count_of = [&](int i) { return min(max(params.counts[i], 0), m); };
    if (params.masked) return {expert * m, count_of(expert)};
    int const begin = expert == 0 ? 0 : count_of(expert - 1);
    return {begin, max(count_of(expert) - begin, 0)};
  }
};

// A CTA tile, as the producer passes it on. Without chunks: there are no more tiles.
struct ExpertTile {
  int expert, first_panel;  // of the expert's weight
  ExpertRows rows;
  int first_token, chunks;
};

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

template <class G, int kChunks = G::kMostChunks>
using TileOf = typename G::template Tile<G::kChunkTokens * kChunks>;

// What a CTA shares besides the stages.
struct ExpertShared {
  std::uint64_t full[wo::most_stages(wo::WgmmaConfig{})], empty[wo::most_stages(wo::WgmmaConfig{})];
  ExpertTile tiles[wo::most_stages(wo::WgmmaConfig{})];  // of stages that are a tile's first
  int ends[kMostWgmmaExperts];                           // numbers of token tiles of all experts up to this one
};

// The producer warp.
template <class G>
class ExpertProducer {
 public:
  using C = TileOf<G>;
  static constexpr int kChunkTokens = G::kChunkTokens;

  __device__ __forceinline__ ExpertProducer(ExpertParams const& params, ExpertShared& shared, SharedAddress stages)
      : params_(params), shared_(shared), stages_(stages) {}

  __device__ __forceinline__ void run() {
    pdl_wait();
    int const token_tiles = count_tiles();
    if (!gemm::elect_one()) return;
#pragma unroll 1
    for (int tile = blockIdx.x; tile < token_tiles * params_.row_tiles; tile += gridDim.x) load(tile_at(tile));
    wait_for_stage();
    shared_.tiles[state_.stage].chunks = 0;
    gemm::mbarrier_arrive(full());
  }

 private:
  __device__ __forceinline__ SharedAddress full() const { return shared_address(shared_.full + state_.stage); }
  __device__ __forceinline__ void wait_for_stage() const {
    gemm::mbarrier_wait(shared_address(shared_.empty + state_.stage), state_.phase);
  }

  // Fills the table; a lane counts every 32nd expert's tiles. Returns their number.
  __device__ __forceinline__ int count_tiles() const {
    constexpr int kWarp = 32;
    int const lane = static_cast<int>(threadIdx.x) % kWarp;
    int all = 0;
#pragma unroll 1
    for (int first = 0; first < params_.experts; first += kWarp) {
      int const expert = first + lane;
      int up_to = 0;
      if (expert < params_.experts) {
        up_to = (ExpertRows::of(params_, expert).count + C::kTokens - 1) / C::kTokens;
      }
#pragma unroll
      for (int apart = 1; apart < kWarp; apart *= 2) {
        int const other = __shfl_up_sync(~0u, up_to, apart);
        if (lane >= apart) up_to += other;
      }
      if (expert < params_.experts) shared_.ends[expert] = all + up_to;
      all += __shfl_sync(~0u, up_to, kWarp - 1);
    }
    __syncwarp();
    return all;
  }

  // Tiles of the same weight rows follow one another and share the expert's chunks evenly. None is empty (which would
  // mean the end): there are as few tiles as hold the chunks.
  __device__ __forceinline__ ExpertTile tile_at(int tile) const {
    int low = 0, high = params_.experts - 1;
#pragma unroll 1
    while (low < high) {
      int const middle = (low + high) / 2;
      if (shared_.ends[middle] * params_.row_tiles > tile) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    int const before = low == 0 ? 0 : shared_.ends[low - 1], tiles = shared_.ends[low] - before;
    tile -= before * params_.row_tiles;
    int const row_tile = tile / tiles, token_tile = tile - row_tile * tiles;
    ExpertRows const rows = ExpertRows::of(params_, low);
    int const all = (rows.count + kChunkTokens - 1) / kChunkTokens, each = (all + tiles - 1) / tiles;
    int const first = token_tile * each;
    return {low, row_tile * C::kPanels, rows, first * kChunkTokens, min(each, all - first)};
  }

  __device__ __forceinline__ void load(ExpertTile const& tile) {
    int const panels = (params_.p.weight.n + wo::kPanelRows - 1) / wo::kPanelRows;
    int const first_panel = tile.expert * panels + tile.first_panel, first_token = tile.rows.begin + tile.first_token;
    int const tokens = tile.chunks * kChunkTokens;
    int const bytes = params_.stage.loaded_bytes(C::kTokens - tokens, C::Tokens::kBytes);
#pragma unroll 1
    for (int step = 0; step < params_.steps; ++step) {
      wait_for_stage();
      if (step == 0) shared_.tiles[state_.stage] = tile;
      SharedAddress const stage = stages_ + state_.stage * params_.stage.bytes;
      C::issue_weights_of(params_, first_panel, stage, full(), bytes, step, params_.zero_bytes > 0);
#pragma unroll
      for (int column = 0; column < wo::kPadding; column += wo::kColumns) {
        SharedAddress const line = stage + params_.stage.tokens_at + wo::tokens_at(tokens, column, C::Tokens::kBytes);
#pragma unroll 1
        for (int token = 0; token < tokens; token += kChunkTokens) {
          gemm::tma_load(line + token * wo::kLine, params_.maps.tokens[0],
                         (step * wo::kPadding + column) * C::Tokens::kBytes, first_token + token, full());
        }
      }
      state_.advance(params_.stages);
    }
  }

  ExpertParams const& params_;
  ExpertShared& shared_;
  SharedAddress stages_;
  gemm::DynamicPipelineState state_{0, 1};  // the first wait for each stage passes
};

// A consumer warpgroup's position in the pipeline.
struct ExpertPipeline {
  SharedAddress full, empty, stages;
  gemm::DynamicPipelineState state;
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
  wo::Problem product = params.p;
  std::int64_t const out =
      params.masked ? tile.expert * params.stride_out_expert : tile.rows.begin * product.stride_out;
  product.m = tile.rows.count;
  product.out = static_cast<T*>(product.out) + out;
  if (product.bias != nullptr) {
    product.bias = static_cast<T const*>(product.bias) + std::int64_t{tile.expert} * product.weight.n;
  }
  float const unit = Mainloop::kUnit * (params.factor != nullptr ? __ldg(params.factor + tile.expert) : 1.f);
  wo::DirectRows<T> const rows(product, (tile.first_panel + mainloop.panel) * wo::kPanelRows);
#pragma unroll
  for (int i = 0; i < Mainloop::kSums; i += 4) rows.store(tile.first_token + i * 2, sums[0] + i, unit);
}

template <class G>
__device__ __forceinline__ void multiply_expert_tiles(ExpertParams const& params, ExpertShared const& shared,
                                                      SharedAddress stages, int group, int warp) {
  pdl_wait();
  ExpertPipeline pipeline{};
  pipeline.full = warp_uniform(shared_address(shared.full));
  pipeline.empty = warp_uniform(shared_address(shared.empty));
  pipeline.stages = warp_uniform(stages);
#pragma unroll 1
  while (true) {
    gemm::mbarrier_wait(pipeline.full + pipeline.state.stage * 8, pipeline.state.phase);
    ExpertTile const tile = shared.tiles[pipeline.state.stage];
    if (tile.chunks == 0) return;
    multiply_expert_tile<G, G::kMostChunks>(params, pipeline, tile, group, warp);
  }
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
    for (int stage = 0; stage < params.stages; ++stage) {
      gemm::mbarrier_init(shared_address(shared.full + stage), 1);
      gemm::mbarrier_init(shared_address(shared.empty + stage), C::kConsumerThreads / 32);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  pdl_trigger();
  if (group == C::kConsumerWarpgroups) {
    cutlass::arch::warpgroup_reg_dealloc<C::kProducerRegisters>();
    if (warp == 0) ExpertProducer<G>(params, shared, stages).run();
  } else {
    cutlass::arch::warpgroup_reg_alloc<C::kConsumerRegisters>();
    multiply_expert_tiles<G>(params, shared, stages, group, warp);
  }
}

template <int kRow, DType kX, Format kFormat>
void launch_expert_wgmma(Problem const& p, int tiles, int, int device, Stream stream) {
  using G = ExpertWgmma<kRow, CudaType<kX>, kFormat>;
  using C = TileOf<G>;
  wo::Problem const& of = p.product;
  wo::Weight all = of.weight;
  all.n *= p.experts;
  int const rows = p.masked ? p.experts * of.m : of.m;
  wo::MatrixReads const reads{wo::WeightReads::of(all, C::kRows, C::kGroups),
                              of.x,
                              of.stride_x,
                              of.weight.k,
                              rows,
                              C::Tokens::kBytes,
                              {G::kChunkTokens, G::kChunkTokens}};
  ExpertParams params{wo::params_of<C>(G::kConfig, of, 1, wo::cached_maps(reads, device), device),
                      p.counts,
                      p.experts,
                      p.masked,
                      p.stride_out_expert,
                      p.factor};
  int const shared_bytes = device_properties(device).shared_memory_per_block - static_cast<int>(sizeof(ExpertShared));
  params.stages = wo::stage_count(G::kConfig, params.stage, shared_bytes);
  static PerDevice prepared;
  prepared.allow_shared(&expert_kernel<G>, shared_bytes, device);
  int const blocks = std::min(tiles * params.row_tiles, device_properties(device).sm_count);
  cuda_check(launch_pdl_clusters(&expert_kernel<G>, dim3(blocks), dim3(1), C::kThreads,
                                 wo::kAtom + params.stages * params.stage.bytes, stream, params),
             "launching epiloq.grouped_packed_mm");
}

}  // namespace epiloq::ops::grouped_packed_mm
