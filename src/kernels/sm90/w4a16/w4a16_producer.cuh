#pragma once

// SM90: what a block keeps in shared memory whose steps one thread copies with TMA into a ring.

#include <cstdint>

#include "cute/arch/copy_sm90_desc.hpp"
#include "cutlass/arch/barrier.h"
#include "kernels/common/device_code.cuh"
#include "kernels/common/ptx/tma.cuh"
#include "kernels/sm90/w4a16/w4a16_stage_layout.h"
#include "problems/weight_only.h"

namespace epiloq::ops::weight_only_mm {

// What TMA reads. Of weights, a step of the block's panels in one box; tokens come in boxes of 64 columns, as many as a
// tile has and, in the last one, as there are: TMA fills in zeros more slowly than it reads. What a box leaves out
// stays what it was, and is multiplied for nobody.
struct TileMaps {
  CUtensorMap weights, tokens[2], scales, zeros;
};

struct TileParams {
  TileMaps maps;
  // What a block's first copies need, side by side: whoever reads a line of constant memory first waits for it.
  int steps, longer;  // of K, that a block has; of those that share it so many have one more
  int token_tiles, tokens;
  int early, stages;
  int group_shift, scale_bytes, zero_bytes;
  TileStage stage;
  int loaded_bytes[2];  // by TMA, a stage: of a whole tile, of the last
  Problem p;
  int tiles;
  int exchange_at;  // in shared memory, behind the ring
};

// A copy waits for its map, which memory may have to give.
__device__ __forceinline__ void prefetch_maps(TileParams const& params) {
  cute::prefetch_tma_descriptor(&params.maps.weights);
  cute::prefetch_tma_descriptor(&params.maps.scales);
  cute::prefetch_tma_descriptor(&params.maps.tokens[0]);
  cute::prefetch_tma_descriptor(&params.maps.tokens[1]);
  if (params.zero_bytes > 0) cute::prefetch_tma_descriptor(&params.maps.zeros);
}

// A stage of the ring, and the parity of the turn that it is waited for in.
struct DecodePlace {
  int at;
  std::uint32_t phase;

  // By at most a turn of the ring.
  __device__ __forceinline__ void advance(int stages, int by = 1) {
    bool const again = at + by >= stages;
    at += again ? by - stages : by;
    phase ^= again;
  }
};

// Tokens that are rows of a matrix, kColumns columns at a time from the first step on.
struct MatrixTokens {
  using Params = TileParams;
  static constexpr int kCopyRegisters = 24;  // of the copying thread, whole eights

  CUtensorMap const& map;
  int first_token, column;

  __device__ MatrixTokens(Params const&, CUtensorMap const& map_, int first_token_, int first_step)
      : map(map_), first_token(first_token_), column(first_step * kPadding) {}

  __device__ __forceinline__ void issue(SharedAddress to, SharedAddress barrier) {
    gemm::tma_load(to, map, column * 2, first_token, barrier);
    column += kColumns;
  }
};

// A block's copies: kGroups groups begin in a step (of 32 or 64 columns), or one that is as long as 2^n steps; a stage
// is free once kProducerWarps warps have said so. Integers rather than a WgmmaConfig: nvcc 13.0 cannot spell a
// structural value in the stub of a __global__ template.
template <int kBits_, int kGroups_, int kRows_, int kTokens_, int kMostStages_, int kProducerWarps, class Tokens_>
struct TileCopies {
  using Tokens = Tokens_;
  using Params = typename Tokens::Params;
  static constexpr int kBits = kBits_, kGroups = kGroups_, kRows = kRows_, kTokens = kTokens_;
  static constexpr int kPanels = kRows / kPanelRows, kStepWords = panel_bytes(kBits) / kMapWord;
  static constexpr int kMostStages = kMostStages_, kEarly = early_steps(kTokens);

  // Barriers of the stages, and of other blocks' sums.
  struct Shared {
    SharedAddress full, empty, received;

    __device__ __forceinline__ explicit Shared(std::uint64_t* barriers)
        : full(shared_address(barriers)), empty(full + kMostStages * 8), received(empty + kMostStages * 8) {}

    // Those that a block's first copies report to, before all others.
    __device__ __forceinline__ void init_early() const {
#pragma unroll
      for (int stage = 0; stage < kEarly; ++stage) gemm::mbarrier_init(full + stage * 8, 1);
      cutlass::arch::fence_barrier_init();
    }
    __device__ __forceinline__ void init_others() const {
#pragma unroll
      for (int stage = kEarly; stage < kMostStages; ++stage) gemm::mbarrier_init(full + stage * 8, 1);
#pragma unroll
      for (int stage = 0; stage < kMostStages; ++stage) gemm::mbarrier_init(empty + stage * 8, kProducerWarps);
      cutlass::arch::fence_barrier_init();
    }
  };

  // Where a block's share of a tile begins. Tiles of the same rows are neighbours and find each other's weights in L2.
  struct Place {
    int first_token, first_panel;
    int first_step, steps;

    __device__ __forceinline__ Place(TileParams const& params, int tile) {
      // A division takes as long as the rest of a block's start; few tokens are one tile.
      int const high = params.token_tiles == 1 ? tile : tile / params.token_tiles, rank = blockIdx.y;
      first_token = (tile - high * params.token_tiles) * kTokens;
      first_panel = high * kPanels;
      first_step = rank * params.steps + min(rank, params.longer);
      steps = params.steps + (rank < params.longer);
    }
  };

  // By one thread, to which each step of few rows leaves some hundred cycles.
  struct Copies {
    Params const& params;
    Place place;
    bool is_last;  // of the token tiles
    Tokens tokens;

    __device__ __forceinline__ Copies(Params const& params_, int tile)
        : params(params_),
          place(params, tile),
          is_last(place.first_token + kTokens > params.tokens),
          tokens(params, params.maps.tokens[is_last], place.first_token, place.first_step) {}

    __device__ __forceinline__ void issue_tokens(SharedAddress stage, SharedAddress barrier) {
#pragma unroll
      for (int column = 0; column < kPadding; column += kColumns) {
        tokens.issue(stage + params.stage.tokens_at + tokens_at(kTokens, column), barrier);
      }
    }

    __device__ __forceinline__ void issue_weights(SharedAddress stage, SharedAddress barrier, int bytes, int step,
                                                  bool has_zeros) const {
      gemm::mbarrier_expect_tx(barrier, bytes);
      gemm::tma_load(stage, params.maps.weights, step * kStepWords, place.first_panel, barrier);
      int const group = step * kGroups >> params.group_shift;
      gemm::tma_load(stage + params.stage.scales_at, params.maps.scales, group * kPanelRows * params.scale_bytes,
                     place.first_panel, barrier);
      if (has_zeros) {
        gemm::tma_load(stage + params.stage.zeros_at, params.maps.zeros, group * kPanelRows, place.first_panel,
                       barrier);
      }
    }

    // A block's first steps: weights before the previous kernel has finished, tokens after. Few steps, as tokens wait
    // until TMA has been through with the weights.
    __device__ __forceinline__ int early() const { return min(place.steps, params.early); }
    __device__ __forceinline__ void issue_early_weights(SharedAddress stages, Shared const& shared) const {
      int const bytes = params.loaded_bytes[is_last];
#pragma unroll
      for (int step = 0; step < kEarly; ++step) {
        if (step >= early()) break;
        issue_weights(stages + step * params.stage.bytes, shared.full + step * 8, bytes, place.first_step + step,
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
    __device__ __forceinline__ void issue_all(SharedAddress stages, Shared const& shared, DecodePlace& ring,
                                              int from = 0) {
      int const bytes = params.loaded_bytes[is_last];
      // Or they are made anew in each turn.
      SharedAddress const first_stage = in_register(stages), first_full = in_register(shared.full);
#pragma unroll 1
      for (int step = place.first_step + from, end = place.first_step + place.steps; step < end; ++step) {
        SharedAddress const full = first_full + ring.at * 8, stage = first_stage + ring.at * params.stage.bytes;
        gemm::mbarrier_wait(full + kMostStages * 8, ring.phase);
        // Or each of the step's multiples has a register of its own, more than a copying thread is left.
        issue_weights(stage, full, bytes, in_register(step), kHasZeros);
        issue_tokens(stage, full);
        ring.advance(params.stages);
      }
    }
  };
};

}  // namespace epiloq::ops::weight_only_mm
