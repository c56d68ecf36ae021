#pragma once

// SM90: tiles of the weight-only kernels for a mixture of experts (grouped_packed_mm, packed_fp4_mm), and the producer
// warp. A CTA tile is some weight rows of an expert by chunks of its tokens, one to as many as the kernel takes. Each
// number of chunks has a main loop of its own, so that a weight is converted once for all tokens of a tile, and few
// tokens are not multiplied as many.
//
// Persistent. The producer warp finds the tiles in a table of the experts' numbers of tiles, which it makes in shared
// memory, and passes each on through the pipeline, beside the tile's first stage. A kernel G has the tile of
// kMostChunks chunks of kChunkTokens tokens, and of fewer (TileOf).

#include <algorithm>

#include "kernels/common/w4a16/epilogue.cuh"
#include "kernels/launch/expert_tiles.h"
#include "kernels/sm90/w4a16/w4a16_launch.cuh"

namespace epiloq::ops::grouped_packed_mm {

namespace wo = weight_only_mm;

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

template <class G, int kChunks = G::kMostChunks>
using TileOf = typename G::template Tile<G::kChunkTokens * kChunks>;

// What a CTA shares besides the stages.
inline constexpr int kMostExpertStages = 8;
struct ExpertShared {
  std::uint64_t full[kMostExpertStages], empty[kMostExpertStages];
  ExpertTile tiles[kMostExpertStages];  // of stages that are a tile's first
  int ends[kMostTabledExperts];         // numbers of token tiles of all experts up to this one

  // By one thread.
  __device__ __forceinline__ void init(int stages, int consumer_warps) {
    for (int stage = 0; stage < stages; ++stage) {
      gemm::mbarrier_init(shared_address(full + stage), 1);
      gemm::mbarrier_init(shared_address(empty + stage), consumer_warps);
    }
    cutlass::arch::fence_barrier_init();
  }
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

  // Fills the table; a lane counts every 32nd expert's tiles, and reads several counts at a time. Returns their number.
  __device__ __forceinline__ int count_tiles() const {
    constexpr int kWarp = 32, kAtOnce = 4;
    int const lane = static_cast<int>(threadIdx.x) % kWarp;
    int all = 0;
#pragma unroll 1
    for (int first = lane; first < params_.experts + lane; first += kAtOnce * kWarp) {
      int up_to[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        int const expert = first + i * kWarp;
        int const count = expert < params_.experts ? ExpertRows::of(params_, expert).count : 0;
        up_to[i] = (count + C::kTokens - 1) / C::kTokens;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int apart = 1; apart < kWarp; apart *= 2) {
          int const other = __shfl_up_sync(~0u, up_to[i], apart);
          if (lane >= apart) up_to[i] += other;
        }
        if (int const expert = first + i * kWarp; expert < params_.experts) shared_.ends[expert] = all + up_to[i];
        all += __shfl_sync(~0u, up_to[i], kWarp - 1);
      }
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

// A consumer's position in the pipeline.
struct ExpertPipeline {
  SharedAddress full, empty, stages;
  gemm::DynamicPipelineState state{};

  __device__ __forceinline__ ExpertPipeline(ExpertShared const& shared, SharedAddress stages_)
      : full(warp_uniform(shared_address(shared.full))),
        empty(warp_uniform(shared_address(shared.empty))),
        stages(warp_uniform(stages_)) {}
};

// Calls multiply(tile) for each tile that the producer passes on.
template <class Multiply>
__device__ __forceinline__ void for_expert_tiles(ExpertShared const& shared, ExpertPipeline const& pipeline,
                                                 Multiply const& multiply) {
  pdl_wait();
#pragma unroll 1
  while (true) {
    gemm::mbarrier_wait(pipeline.full + pipeline.state.stage * 8, pipeline.state.phase);
    ExpertTile const tile = shared.tiles[pipeline.state.stage];
    if (tile.chunks == 0) return;
    multiply(tile);
  }
}

// The product of a tile's expert, with its part of the output.
template <class T>
__device__ __forceinline__ wo::Problem product_of(ExpertParams const& params, ExpertTile const& tile) {
  wo::Problem product = params.p;
  std::int64_t const out =
      params.masked ? tile.expert * params.stride_out_expert : tile.rows.begin * product.stride_out;
  product.m = tile.rows.count;
  product.out = static_cast<T*>(product.out) + out;
  if (product.bias != nullptr) {
    product.bias = static_cast<T const*>(product.bias) + std::int64_t{tile.expert} * product.weight.n;
  }
  return product;
}
__device__ __forceinline__ float factor_of(ExpertParams const& params, ExpertTile const& tile) {
  return params.factor != nullptr ? __ldg(params.factor + tile.expert) : 1.f;
}

// `blocks` CTAs per SM, each with as many bytes behind the stages.
template <class G>
void launch_expert_tiles(void (*kernel)(ExpertParams), Problem const& p, int tiles, int blocks, int more_bytes,
                         int device, Stream stream) {
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
  int const room = (device_properties(device).shared_memory_per_block + kReservedPerCta) / blocks - kReservedPerCta -
                   static_cast<int>(sizeof(ExpertShared));
  params.stages = std::min(kMostExpertStages, (room - wo::kAtom - more_bytes) / params.stage.bytes);
  static PerDevice prepared;
  prepared.allow_shared(kernel, room, device);
  int const ctas = std::min(tiles * params.row_tiles, blocks * device_properties(device).sm_count);
  int const bytes = wo::kAtom + params.stages * params.stage.bytes + more_bytes;
  cuda_check(launch_pdl_clusters(kernel, dim3(ctas), dim3(1), C::kThreads, bytes, stream, params),
             "launching epiloq.grouped_packed_mm");
}

}  // namespace epiloq::ops::grouped_packed_mm
