#pragma once

// Producer of the TMA-fed weight-only kernels: parameters, shared-memory layout, and one thread's copies.

#include <cstdint>

#include "cute/arch/copy_sm90_desc.hpp"
#include "cutlass/arch/barrier.h"
#include "kernels/common/device_code.cuh"
#include "kernels/common/pipeline.cuh"
#include "kernels/common/ptx/tma.cuh"
#include "kernels/common/tile_bands.cuh"
#include "kernels/sm90/w4a16/w4a16_stage_layout.h"
#include "problems/weight_only.h"

namespace epiloq::ops::weight_only_mm {

// TMA descriptors. Weights: one box per K step of the CTA's panels. Tokens: boxes of 64 columns by the tile's tokens, a
// smaller one for the last tile, as TMA zero-fills more slowly than it reads. Shared memory outside a box keeps its
// contents, and the products with it are ignored.
struct TileMaps {
  CUtensorMap weights, tokens[2], scales, zeros;
};

struct TileParams {
  TileMaps maps;
  // What a CTA's first copies need comes first: reading constant memory waits per line.
  int steps, longer;  // K steps per CTA; this many CTAs of a cluster have one more
  int token_tiles, row_tiles, tokens;
  int early, stages;
  int group_shift, scale_bytes, zero_bytes;
  TileStage stage;
  int loaded_bytes[2];  // bytes that TMA loads per stage: of a whole tile, of the last
  Problem p;
  int tiles;
  int exchange_at;  // in shared memory, after the stages
};

// Prefetches the descriptors, which may be in memory.
__device__ __forceinline__ void prefetch_maps(TileParams const& params) {
  cute::prefetch_tma_descriptor(&params.maps.weights);
  cute::prefetch_tma_descriptor(&params.maps.scales);
  cute::prefetch_tma_descriptor(&params.maps.tokens[0]);
  cute::prefetch_tma_descriptor(&params.maps.tokens[1]);
  if (params.zero_bytes > 0) cute::prefetch_tma_descriptor(&params.maps.zeros);
}

// Tokens that are rows of a matrix, a swizzle line of columns at a time from the first step on; kBytes per element.
template <int kBytes_, class Params_>
struct RowTokens {
  using Params = Params_;
  static constexpr int kBytes = kBytes_;
  static constexpr int kProducerRegisters = 24;  // of the producer thread, a multiple of eight

  CUtensorMap const& map;
  int first_token, column;

  __device__ RowTokens(Params const&, CUtensorMap const& map_, int first_token_, int first_step)
      : map(map_), first_token(first_token_), column(first_step * kPadding) {}

  __device__ __forceinline__ void issue(SharedAddress to, SharedAddress barrier) {
    gemm::tma_load(to, map, column * kBytes, first_token, barrier);
    column += kLine / kBytes;
  }
};
using MatrixTokens = RowTokens<2, TileParams>;

// A CTA's copies: kGroups scale groups begin in a K step (of 32 or 64 columns), or one that spans 2^n steps; a stage is
// free once kConsumerWarps warps have released it. Integers rather than a WgmmaConfig: nvcc 13.0 cannot name a
// structural value in the stub of a __global__ template.
template <int kBits_, int kGroups_, int kRows_, int kTokens_, int kMostStages_, int kConsumerWarps, class Tokens_,
          bool kInBands = true>
struct TileCopies {
  using Tokens = Tokens_;
  using Params = typename Tokens::Params;
  static constexpr int kBits = kBits_, kGroups = kGroups_, kRows = kRows_, kTokens = kTokens_;
  static constexpr int kPanels = kRows / kPanelRows, kStepWords = panel_bytes(kBits) / kMapWord;
  static constexpr int kMostStages = kMostStages_, kEarly = early_steps(kTokens);

  // Barriers of the stages, and for other CTAs' sums.
  struct Shared {
    SharedAddress full, empty, received;

    __device__ __forceinline__ explicit Shared(std::uint64_t* barriers)
        : full(shared_address(barriers)), empty(full + kMostStages * 8), received(empty + kMostStages * 8) {}

    // The barriers of the first copies, initialised before all others.
    __device__ __forceinline__ void init_early() const {
#pragma unroll
      for (int stage = 0; stage < kEarly; ++stage) gemm::mbarrier_init(full + stage * 8, 1);
      cutlass::arch::fence_barrier_init();
    }
    __device__ __forceinline__ void init_others() const {
#pragma unroll
      for (int stage = kEarly; stage < kMostStages; ++stage) gemm::mbarrier_init(full + stage * 8, 1);
#pragma unroll
      for (int stage = 0; stage < kMostStages; ++stage) gemm::mbarrier_init(empty + stage * 8, kConsumerWarps);
      cutlass::arch::fence_barrier_init();
    }
  };

  // A tile and the CTA's K steps of it.
  struct WorkTile {
    int first_token, first_panel;
    int first_step, steps;

    __device__ __forceinline__ WorkTile(TileParams const& params, int tile) {
      auto const [token_tile, row_tile] =
          gemm::tile_in_bands<kTokens, kInBands>(tile, params.token_tiles, params.row_tiles);
      int const rank = blockIdx.y;
      first_token = token_tile * kTokens;
      first_panel = row_tile * kPanels;
      first_step = rank * params.steps + min(rank, params.longer);
      steps = params.steps + (rank < params.longer);
    }
  };

  // The weights of a K step, from a panel on; `bytes` of the whole stage.
  static __device__ __forceinline__ void issue_weights_of(TileParams const& params, int first_panel,
                                                          SharedAddress stage, SharedAddress barrier, int bytes,
                                                          int step, bool has_zeros) {
    gemm::mbarrier_expect_tx(barrier, bytes);
    gemm::tma_load(stage, params.maps.weights, step * kStepWords, first_panel, barrier);
    int const group = step * kGroups >> params.group_shift;
    gemm::tma_load(stage + params.stage.scales_at, params.maps.scales, group * kPanelRows * params.scale_bytes,
                   first_panel, barrier);
    if (has_zeros) {
      gemm::tma_load(stage + params.stage.zeros_at, params.maps.zeros, group * kPanelRows, first_panel, barrier);
    }
  }

  // Executed by one thread; for tiles of few rows a K step leaves it some hundred cycles.
  struct Copies {
    Params const& params;
    WorkTile work;
    bool is_last;  // token tile
    Tokens tokens;

    __device__ __forceinline__ Copies(Params const& params_, int tile)
        : params(params_),
          work(params, tile),
          is_last(work.first_token + kTokens > params.tokens),
          tokens(params, params.maps.tokens[is_last], work.first_token, work.first_step) {}

    __device__ __forceinline__ void issue_tokens(SharedAddress stage, SharedAddress barrier) {
#pragma unroll
      for (int column = 0; column < kPadding; column += kLine / Tokens::kBytes) {
        tokens.issue(stage + params.stage.tokens_at + tokens_at(kTokens, column, Tokens::kBytes), barrier);
      }
    }

    __device__ __forceinline__ void issue_weights(SharedAddress stage, SharedAddress barrier, int bytes, int step,
                                                  bool has_zeros) const {
      issue_weights_of(params, work.first_panel, stage, barrier, bytes, step, has_zeros);
    }

    // First K steps: weights before pdl_wait, tokens after. Few steps, as tokens queue behind the weights in TMA.
    __device__ __forceinline__ int early() const { return min(work.steps, params.early); }
    __device__ __forceinline__ void issue_early_weights(SharedAddress stages, Shared const& shared) const {
      int const bytes = params.loaded_bytes[is_last];
#pragma unroll
      for (int step = 0; step < kEarly; ++step) {
        if (step >= early()) break;
        issue_weights(stages + step * params.stage.bytes, shared.full + step * 8, bytes, work.first_step + step,
                      params.zero_bytes > 0);
      }
    }
    __device__ __forceinline__ void issue_early_tokens(SharedAddress stages, Shared const& shared) {
#pragma unroll 1
      for (int step = 0; step < early(); ++step) {
        issue_tokens(stages + step * params.stage.bytes, shared.full + step * 8);
      }
    }

    template <bool kHasZeros>
    __device__ __forceinline__ void issue_all(SharedAddress stages, Shared const& shared,
                                              gemm::DynamicPipelineState& state, int from = 0) {
      int const bytes = params.loaded_bytes[is_last];
      // Otherwise these are recomputed in each iteration.
      SharedAddress const first_stage = in_register(stages), first_full = in_register(shared.full);
#pragma unroll 1
      for (int step = work.first_step + from, end = work.first_step + work.steps; step < end; ++step) {
        SharedAddress const full = first_full + state.stage * 8, stage = first_stage + state.stage * params.stage.bytes;
        gemm::mbarrier_wait(full + kMostStages * 8, state.phase);
        // Otherwise each multiple of the step gets a register, more than the producer has.
        issue_weights(stage, full, bytes, in_register(step), kHasZeros);
        issue_tokens(stage, full);
        state.advance(params.stages);
      }
    }
  };
};

}  // namespace epiloq::ops::weight_only_mm
