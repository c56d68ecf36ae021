#pragma once

// What fills the group-wise kernel's stages: TMA for tokens, weights and scales of tokens that lie in columns, and
// small copies for other scales.

#include <cute/arch/copy_sm90_desc.hpp>

#include "core/async_copy.cuh"
#include "gemm/sm90_groupwise_tile.cuh"
#include "gemm/tma.cuh"

namespace epiloq::gemm {

// A thread that asks TMA for tokens and weights, or one of them, and for scales where they lie so that it can. Its way
// around the ring takes as long as a short step: addresses are at hand. Built by whole warps.
template <class C>
struct TileReader {
  GroupwiseParams const& params;
  SharedAddress full, empty, tokens, weights, scales;

  __device__ TileReader(GroupwiseParams const& params_, typename C::Shared const& shared)
      : params(params_),
        full(uniform(shared_address(shared.full()))),
        empty(uniform(shared_address(shared.empty()))),
        tokens(uniform(shared_address(shared.tokens(0)))),
        weights(uniform(shared_address(shared.weights(0)))),
        scales(uniform(shared_address(shared.scales(0)))) {}

  // Before the previous kernel has finished. Few boxes each: the first tokens stand behind them, and a quantiser that
  // still runs waits longer for what it reads.
  static constexpr int kEarlyBoxes = 8;

  // Asks for the descriptor of the first tokens, and L2 for the first weights. Harmless even if the previous kernel
  // writes them: L2 is where its writes arrive. (Not where experts' rows are known only then.)
  __device__ void prefetch() const {
    cute::prefetch_tma_descriptor(&params.tokens.maps[params.p.m < C::kM]);
    if (params.p.offs != nullptr || params.p.masked_m != nullptr) return;
    GroupwiseScheduler<C> scheduler(params.p, params.tiles);
    GroupwiseTile tile;
    if (!scheduler.next(tile)) return;
    for (int k = 0; k < min(params.p.k, kEarlyBoxes * kGroupDepth); k += kGroupDepth) {
      prefetch_box(params.weights.maps[0], k, tile.first_column);
    }
  }

  // Asks for the weights of the first steps, which nobody may still write, into their stages. Returns of how many.
  __device__ int ask_early(int reader) const {
    GroupwiseScheduler<C> scheduler(params.p, params.tiles);
    GroupwiseTile tile;
    if (!scheduler.next(tile)) return 0;
    int const depth = (params.p.k + kGroupDepth - 1) / kGroupDepth, early = min(depth, min(kEarlyBoxes, C::kStages));
    bool const last_row = tile.first_row + C::kM > tile.end_row, last_column = tile.first_column + C::kN > params.p.n;
    int const expected = C::kApart ? params.weights.boxes[last_column] * kGroupDepth : bytes_of(last_row, last_column);
    cute::prefetch_tma_descriptor(&params.tokens.maps[last_row]);
#pragma unroll 1
    for (int i = reader; i < early; i += C::kReaders) {
      expect_bytes(full + i * 8, expected);
      copy_box(weights + i * C::kWeightBytes, params.weights.maps[last_column], i * kGroupDepth, tile.first_column,
               full + i * 8);
    }
    return early;
  }

  // What a stage gets by a thread that asks for both.
  __device__ int bytes_of(bool last_row, bool last_column) const {
    int const scale_bytes = params.copies_scales ? params.tokens.boxes[0] * 4 : 0;
    return (params.tokens.boxes[last_row] + params.weights.boxes[last_column]) * kGroupDepth + scale_bytes;
  }

  // Every kReaders-th step. The first `early` ones have their weights.
  __device__ void run(int reader, int early) const {
    int const depth = (params.p.k + kGroupDepth - 1) / kGroupDepth;
    bool const copies_scales = params.copies_scales;
    int step = 0;
    RingPosition<C> ring(reader);
    GroupwiseScheduler<C> scheduler(params.p, params.tiles);
    for (GroupwiseTile tile; scheduler.next(tile);) {
      int const weight_row = tile.expert * params.p.n + tile.first_column;
      bool const last_row = tile.first_row + C::kM > tile.end_row, last_column = tile.first_column + C::kN > params.p.n;
      CUtensorMap const &token_map = params.tokens.maps[last_row], &weight_map = params.weights.maps[last_column];
      int const expected = bytes_of(last_row, last_column);
      for (int i = 0; i < depth; ++i, ++step) {
        if (step % C::kReaders != reader) continue;
        SharedAddress const barrier = full + ring.stage * 8;
        bool const has_weights = C::kFew && step < early;
        if (!has_weights) {
          wait_for_barrier(empty + ring.stage * 8, ring.parity ^ 1);
          expect_bytes(barrier, expected);
        }
        copy_box(tokens + ring.stage * C::kTokenBytes, token_map, i * kGroupDepth, tile.first_row, barrier);
        if (!has_weights) {
          copy_box(weights + ring.stage * C::kWeightBytes, weight_map, i * kGroupDepth, weight_row, barrier);
        }
        if (copies_scales) {
          copy_box(scales + ring.stage * (C::kStageScales * 4), params.scales, tile.first_row, i, barrier);
        }
        ring.advance(C::kReaders);
      }
    }
  }

  // Every kReaders-th step of either tokens or weights, around a ring of their own. Weights begin behind those that
  // were asked for early.
  __device__ void run_apart(bool of_tokens, int reader, int early) const {
    RowTiles const& from = of_tokens ? params.tokens : params.weights;
    SharedAddress const to = of_tokens ? tokens : weights;
    int const bytes = of_tokens ? C::kTokenBytes : C::kWeightBytes;
    int const stages = of_tokens ? C::kTokenStages : C::kStages, first = of_tokens ? 0 : early;
    int const depth = (params.p.k + kGroupDepth - 1) / kGroupDepth;
    int step = 0, stage = reader;
    RingPosition<C> ring(reader), behind(reader);  // this step's, and that of the step that has to make room for it
    GroupwiseScheduler<C> scheduler(params.p, params.tiles);
    for (GroupwiseTile tile; scheduler.next(tile);) {
      int const row = of_tokens ? tile.first_row : tile.expert * params.p.n + tile.first_column;
      bool const is_last = of_tokens ? tile.first_row + C::kM > tile.end_row : tile.first_column + C::kN > params.p.n;
      CUtensorMap const& map = from.maps[is_last];
      int const expected = from.boxes[is_last] * kGroupDepth;
      for (int i = 0; i < depth; ++i, ++step) {
        if (step % C::kReaders != reader) continue;
        if (step >= stages) {
          wait_for_barrier(empty + behind.stage * 8, behind.parity);
          behind.advance(C::kReaders);
        }
        if (step >= first) {
          expect_bytes(full + ring.stage * 8, expected);
          copy_box(to + stage * bytes, map, i * kGroupDepth, row, full + ring.stage * 8);
        }
        ring.advance(C::kReaders);
        stage = stage + C::kReaders < stages ? stage + C::kReaders : stage + C::kReaders - stages;
      }
    }
  }
};

// A thread that asks TMA for all scales, where steps are short and the one that asks for tokens and weights has no time
// for more.
template <class C>
__device__ void copy_all_scales(GroupwiseParams const& params, typename C::Shared const& shared, int reader) {
  constexpr int kWeightBytes = 2 * C::kQuad * 4;
  auto const& p = params.p;
  int const depth = (p.k + kGroupDepth - 1) / kGroupDepth, bytes = params.tokens.boxes[0] * 4 + kWeightBytes;
  SharedAddress const full = uniform(shared_address(shared.full())), empty = uniform(shared_address(shared.empty()));
  SharedAddress const scales = uniform(shared_address(shared.scales(0)));
  int step = 0;
  RingPosition<C> ring(reader);
  GroupwiseScheduler<C> scheduler(p, params.tiles);
  for (GroupwiseTile tile; scheduler.next(tile);) {
    int const row = tile.first_column / kGroupDepth;  // of the one expert there is
    for (int i = 0; i < depth; ++i, ++step) {
      if (step % C::kReaders != reader) continue;
      SharedAddress const barrier = full + ring.stage * 8, to = scales + ring.stage * (C::kStageScales * 4);
      wait_for_barrier(empty + ring.stage * 8, ring.parity ^ 1);
      expect_bytes(barrier, bytes);
      copy_box(to, params.scales, tile.first_row, i, barrier);
      copy_box(to + C::kM * 4, params.weight_scales, i / C::kQuad * C::kQuad, row, barrier);
      ring.advance(C::kReaders);
    }
  }
}

// The warps that fetch scales that TMA does not, four bytes at a time and so from any layout. `own` is the thread's
// first row. They take time from what multiplies on the same schedulers, 7 % with rows' scales and all in one warp.
template <class C>
__device__ void read_scales(GroupwiseParams const& params, typename C::Shared const& shared, int reader, int own) {
  constexpr int kTogether = 32 * C::kScaleWarps;
  constexpr int kTokenTurns = (C::kM + kTogether - 1) / kTogether;
  constexpr int kWeightTurns = (C::kWeightScales + kTogether - 1) / kTogether;
  auto const& p = params.p;
  int const depth = (p.k + kGroupDepth - 1) / kGroupDepth;
  int const own_weight = kTogether - 1 - own;  // the warp that may have fewer rows begins
  SharedAddress const full = kept(shared_address(shared.full())), empty = kept(shared_address(shared.empty()));
  SharedAddress const tokens = kept(shared_address(shared.scales(0) + own));
  SharedAddress const weights = kept(shared_address(shared.scales(0) + C::kM + own_weight));
  int step = 0;
  RingPosition<C> ring(reader);
  GroupwiseScheduler<C> scheduler(p, params.tiles);
  for (GroupwiseTile tile; scheduler.next(tile);) {
    unsigned token[kTokenTurns], weight[kWeightTurns];  // offsets
#pragma unroll
    for (int t = 0; t < kTokenTurns; ++t) {
      int const row = max(0, min(tile.first_row + own + kTogether * t, tile.end_row - 1));
      token[t] = (row >> p.scale_a.shift) * p.scale_a.stride_row;
    }
#pragma unroll
    for (int t = 0; t < kWeightTurns; ++t) {
      int const index = own_weight + kTogether * t, offset = C::kColumnScales ? index : index * (C::kN - 1);
      int const column = min(tile.first_column + offset, p.n - 1);
      weight[t] = tile.expert * p.scale_b_expert + (column >> p.scale_b.shift) * p.scale_b.stride_row;
    }
    for (int i = 0; i < depth; ++i, ++step) {
      if (step % C::kReaders != reader) continue;
      wait_for_barrier(empty + ring.stage * 8, ring.parity ^ 1);
      SharedAddress const stage = ring.stage * (C::kStageScales * 4);
      if (!params.copies_scales) {
#pragma unroll
        for (int t = 0; t < kTokenTurns; ++t) {
          if (own + kTogether * t >= C::kM) continue;
          copy4(tokens + stage + 4 * kTogether * t, p.scale_a.ptr + (token[t] + i * p.scale_a.stride_k));
        }
      }
#pragma unroll
      for (int t = 0; t < kWeightTurns; ++t) {
        if (own_weight + kTogether * t >= C::kWeightScales) continue;
        copy4(weights + stage + 4 * kTogether * t, p.scale_b.ptr + (weight[t] + i * p.scale_b.stride_k));
      }
      arrive_after_copies(full + ring.stage * 8);
      ring.advance(C::kReaders);
    }
  }
}

}  // namespace epiloq::gemm
