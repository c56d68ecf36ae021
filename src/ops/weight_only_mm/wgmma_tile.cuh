#pragma once

// SM90: what a block of the wgmma kernel keeps in shared memory, and the thread that fills it with TMA.

#include <cstdint>

#include "core/device_code.cuh"
#include "cute/arch/copy_sm90_desc.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/arch/barrier.h"
#include "ops/weight_only_mm/kernels.h"
#include "ops/weight_only_mm/wgmma_layout.h"

namespace epiloq::ops::weight_only_mm {

// What TMA reads. Of weights, a step of the block's slabs in one box; tokens come in boxes of 64 columns, as many as a
// tile has and, in the last one, as there are: TMA fills in zeros more slowly than it reads. What a box leaves out
// stays what it was, and is multiplied for nobody.
struct WgmmaMaps {
  CUtensorMap weights, tokens[2], scales, zeros;
};

struct WgmmaParams {
  WgmmaMaps maps;
  // What a block's first copies need, side by side: whoever reads a line of constant memory first waits for it.
  int steps, longer;  // of K, that a block has; of those that share it so many have one more
  int token_tiles, tokens;
  int early, stages;
  int group_shift, scale_bytes, zero_bytes;
  WgmmaStage stage;
  int loaded_bytes[2];  // by TMA, a stage: of a whole tile, of the last
  Problem p;
  int tiles;
  int exchange_at;  // in shared memory, behind the ring
};

// A copy waits for its map, which memory may have to give.
__device__ __forceinline__ void prefetch_maps(WgmmaParams const& params) {
  cute::prefetch_tma_descriptor(&params.maps.weights);
  cute::prefetch_tma_descriptor(&params.maps.scales);
  cute::prefetch_tma_descriptor(&params.maps.tokens[0]);
  cute::prefetch_tma_descriptor(&params.maps.tokens[1]);
  if (params.zero_bytes > 0) cute::prefetch_tma_descriptor(&params.maps.zeros);
}

// A stage of the ring, and the parity of the turn that it is waited for in.
struct RingPlace {
  int at;
  std::uint32_t phase;

  // By at most a turn of the ring.
  __device__ __forceinline__ void advance(int stages, int by = 1) {
    bool const again = at + by >= stages;
    at += again ? by - stages : by;
    phase ^= again;
  }
};

inline constexpr auto kCopyHint = static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);

// Tokens that are rows of a matrix, kColumns columns at a time from the first step on.
struct MatrixTokens {
  using Params = WgmmaParams;
  static constexpr int kCopyRegisters = 24;  // of the copying thread, whole eights

  CUtensorMap const& map;
  int first_token, column;

  __device__ MatrixTokens(Params const&, CUtensorMap const& map_, int first_token_, int first_step)
      : map(map_), first_token(first_token_), column(first_step * kPadding) {}

  __device__ __forceinline__ void ask(unsigned char* to, std::uint64_t* barrier) {
    cute::SM90_TMA_LOAD_2D::copy(&map, barrier, kCopyHint, to, column * 2, first_token);
    column += kColumns;
  }
};

// kGroups groups begin in a step (of 32 or 64 columns), or one that is as long as 2^n steps. Integers rather than a
// WgmmaConfig: nvcc 13.0 cannot spell a structural value in the stub of a __global__ template.
template <class T_, int kBits_, int kGroups_, int kTeams_, int kWays_, int kBlocks_, int kTokens_, bool kRounds_,
          class Tokens_ = MatrixTokens>
struct Wgmma {
  using T = T_;
  using Tokens = Tokens_;
  using Params = typename Tokens::Params;
  static constexpr int kBits = kBits_, kGroups = kGroups_, kTeams = kTeams_, kWays = kWays_, kBlocks = kBlocks_;
  static constexpr int kTokens = kTokens_;
  static constexpr bool kRounds = kRounds_;
  static constexpr int kTeamThreads = 128, kWayThreads = kTeams * kTeamThreads, kMathTeams = kTeams * kWays;
  static constexpr int kMathThreads = kMathTeams * kTeamThreads;
  static constexpr int kRows = 64 * kTeams * kBlocks;
  static constexpr int kSlabs = kRows / kSlab, kStepWords = slab_bytes(kBits) / kMapWord;
  // Beside them one warp copies; or four, as many as can give registers away. One team alone has as many as an
  // instruction can name, and for few tokens any has enough: sharing out anew takes 300 cycles of a block's start.
  static constexpr bool kSharesRegisters = kMathTeams > 1 && kTokens > 16;
  static constexpr int kCopyThreads = kSharesRegisters ? kTeamThreads : 32, kThreads = kMathThreads + kCopyThreads;
  static constexpr int kEqualRegisters = 65536 / kThreads / 8 * 8, kCopyRegisters = Tokens::kCopyRegisters;
  static constexpr int kMathRegisters = (kEqualRegisters + (kEqualRegisters - kCopyRegisters) / kMathTeams) / 8 * 8;

  static constexpr int kResident = resident_blocks(kMathTeams, kTokens);
  static constexpr bool kSendsSums = sends_sums(kWays, kTokens);  // where blocks share K
  static constexpr int kEarly = early_steps(kTokens);
  // Steps to a turn of the loop that multiplies: ptxas looks ahead within one, which few tokens want where L2 has the
  // weights (1.5 % by 16 of them; from memory they take as long).
  static constexpr int kTogether = kTokens <= 16 ? 4 : 1;

  // Barriers of the stages; CUTLASS's may not be variables.
  struct Shared {
    cutlass::arch::ClusterTransactionBarrier* full;
    cutlass::arch::ClusterBarrier* empty;
    std::uint64_t* received;  // of other blocks' sums

    __device__ explicit Shared(std::uint64_t* barriers)
        : full(reinterpret_cast<cutlass::arch::ClusterTransactionBarrier*>(barriers)),
          empty(reinterpret_cast<cutlass::arch::ClusterBarrier*>(barriers + kMaxStages)),
          received(barriers + 2 * kMaxStages) {}

    // Those that a block's first copies report to, before all others.
    __device__ __forceinline__ void init_early() const {
#pragma unroll
      for (int stage = 0; stage < kEarly; ++stage) full[stage].init(1);
      cutlass::arch::fence_barrier_init();
    }
    __device__ __forceinline__ void init_others() const {
#pragma unroll
      for (int stage = kEarly; stage < kMaxStages; ++stage) full[stage].init(1);
#pragma unroll
      for (int stage = 0; stage < kMaxStages; ++stage) empty[stage].init(kWayThreads / 32);
      cutlass::arch::fence_barrier_init();
    }
  };

  // Where a block's share of a tile begins. Tiles of the same rows are neighbours and find each other's weights in L2.
  struct Place {
    int first_token, first_slab;
    int first_step, steps;

    __device__ __forceinline__ Place(WgmmaParams const& params, int tile) {
      // A division takes as long as the rest of a block's start; few tokens are one tile.
      int const high = params.token_tiles == 1 ? tile : tile / params.token_tiles, rank = blockIdx.y;
      first_token = (tile - high * params.token_tiles) * kTokens;
      first_slab = high * kSlabs;
      first_step = rank * params.steps + min(rank, params.longer);
      steps = params.steps + (rank < params.longer);
    }
  };

  struct Copies {
    Params const& params;
    Place place;
    bool is_last;  // of the token tiles
    Tokens tokens;

    __device__ Copies(Params const& params_, int tile)
        : params(params_),
          place(params, tile),
          is_last(place.first_token + kTokens > params.tokens),
          tokens(params, params.maps.tokens[is_last], place.first_token, place.first_step) {}

    __device__ void ask_for_tokens(unsigned char* stage, std::uint64_t* barrier) {
#pragma unroll
      for (int column = 0; column < kPadding; column += kColumns) {
        tokens.ask(stage + params.stage.tokens_at + tokens_at(kTokens, column), barrier);
      }
    }

    __device__ void ask_for_weights(unsigned char* stage, std::uint64_t* barrier, int step) const {
      cute::SM90_TMA_LOAD_2D::copy(&params.maps.weights, barrier, kCopyHint, stage, step * kStepWords,
                                   place.first_slab);
      int const group = step * kGroups >> params.group_shift;
      cute::SM90_TMA_LOAD_2D::copy(&params.maps.scales, barrier, kCopyHint, stage + params.stage.scales_at,
                                   group * kSlab * params.scale_bytes, place.first_slab);
      if (params.zero_bytes > 0) {
        cute::SM90_TMA_LOAD_2D::copy(&params.maps.zeros, barrier, kCopyHint, stage + params.stage.zeros_at,
                                     group * kSlab, place.first_slab);
      }
    }

    static __device__ __forceinline__ std::uint64_t* barrier_of(Shared const& shared, int stage) {
      return reinterpret_cast<std::uint64_t*>(&shared.full[stage]);
    }

    // A block's first steps: weights before the previous kernel has finished, tokens after. Few steps, as tokens wait
    // until TMA has been through with the weights.
    __device__ __forceinline__ int early() const { return min(place.steps, params.early); }
    __device__ __forceinline__ void ask_for_early_weights(unsigned char* stages, Shared const& shared) const {
#pragma unroll
      for (int step = 0; step < kEarly; ++step) {
        if (step >= early()) break;
        shared.full[step].arrive_and_expect_tx(params.loaded_bytes[is_last]);
        ask_for_weights(stages + step * params.stage.bytes, barrier_of(shared, step), place.first_step + step);
      }
    }
    __device__ __forceinline__ void ask_for_early_tokens(unsigned char* stages, Shared const& shared) {
#pragma unroll 1
      for (int step = 0; step < early(); ++step) {
        ask_for_tokens(stages + step * params.stage.bytes, barrier_of(shared, step));
      }
    }

    __device__ void ask_for_all(unsigned char* stages, Shared const& shared, RingPlace& ring, int from = 0) {
#pragma unroll 1
      for (int step = from; step < place.steps; ++step) {
        shared.empty[ring.at].wait(ring.phase);
        shared.full[ring.at].arrive_and_expect_tx(params.loaded_bytes[is_last]);
        ask_for_weights(stages + ring.at * params.stage.bytes, barrier_of(shared, ring.at), place.first_step + step);
        ask_for_tokens(stages + ring.at * params.stage.bytes, barrier_of(shared, ring.at));
        ring.advance(params.stages);
      }
    }
  };
};

}  // namespace epiloq::ops::weight_only_mm
