#pragma once

// Producer warps of the groupwise GEMM: TMA loads of tokens, weights, and token scales that are stored by columns.

#include <cute/arch/copy_sm90_desc.hpp>

#include "kernels/common/ptx/shared_memory.cuh"
#include "kernels/common/ptx/tma.cuh"
#include "kernels/sm90/groupwise_split_k.cuh"

namespace epiloq::gemm {

// Producer warps alternate K steps over all tiles: the first step of a tile that belongs to `producer`, `before` steps
// into the CTA's work.
template <class C>
__device__ __forceinline__ int first_step_of(int producer, int before) {
  static_assert(C::kProducerWarps <= 2);
  return (producer + before) % C::kProducerWarps;
}

// Weight scales of a tile with one scale per 128 columns: those of its first and last column at a K step.
template <class C>
class WeightScales {
 public:
  __device__ WeightScales(GroupwiseProblem const& p, GroupwiseTile const& tile) {
    GroupScales const& scales = p.scale_b;
    int const first = tile.first_column >> scales.shift;
    int const last = (min(tile.first_column + C::kN, p.n) - 1) >> scales.shift;
    first_ = scales.ptr + std::int64_t{tile.expert} * p.scale_b_expert + first * scales.stride_row;
    to_last_ = C::kOneWeightScale ? 0 : (last - first) * scales.stride_row;
    stride_k_ = scales.stride_k;
  }
  __device__ float2 at(int step) const { return {first_[step * stride_k_], first_[step * stride_k_ + to_last_]}; }

 private:
  float const* first_;
  int to_last_, stride_k_;
};

// A producer warp for tokens and weights, or for one of them, and for scales where TMA can load them. All lanes walk
// the loop, which keeps addresses in uniform registers, and one elected lane issues. The loop is unrolled by hand: nvcc
// 13.0 drops the remainder of an unrolled loop around an elected lane.
template <class C>
struct TileProducer {
  GroupwiseParams const& params;
  KRange<C> k_range;
  SharedAddress full, empty, tokens, weights, scales;

  __device__ TileProducer(GroupwiseParams const& params_, typename C::Shared const& shared)
      : params(params_),
        k_range(params_),
        full(warp_uniform(shared_address(shared.full()))),
        empty(warp_uniform(shared_address(shared.empty()))),
        tokens(warp_uniform(shared_address(shared.tokens(0)))),
        weights(warp_uniform(shared_address(shared.weights(0)))),
        scales(warp_uniform(shared_address(shared.scales(0)))) {}

  // Boxes of weights issued before pdl_wait: few, as the first tokens queue behind them and a quantising kernel that
  // still runs is slowed down.
  static constexpr int kEarlyBoxes = 8;

  // Prefetches the descriptor of the first tokens, and the first weights into L2. Safe even if the previous kernel
  // still writes the weights, as its writes go to L2. (Not with experts, whose rows are not known yet.)
  __device__ void prefetch() const {
    cute::prefetch_tma_descriptor(&params.tokens.maps[params.p.m < C::kM]);
    if (params.p.offs != nullptr || params.p.masked_m != nullptr) return;
    GroupwiseScheduler<C> scheduler(params.p, params.tiles);
    GroupwiseTile tile;
    if (!scheduler.next(tile)) return;
    KSteps const steps = k_range.of(tile);
    for (int i = 0; i < min(steps.depth, kEarlyBoxes); ++i) {
      tma_prefetch(params.weights.maps[0], (steps.first + i) * kGroupDepth, tile.first_column);
    }
  }

  // Issues the weights of the first K steps, which constant_b guarantees that no running kernel writes; returns their
  // number. Called by a whole warp, like `run` and `run_separate`.
  __device__ int issue_early(int producer) const {
    GroupwiseScheduler<C> scheduler(params.p, params.tiles);
    GroupwiseTile tile;
    if (!scheduler.next(tile)) return 0;
    KSteps const steps = k_range.of(tile);
    int const early = min(steps.depth, min(kEarlyBoxes, C::kStages));
    bool const last_row = tile.first_row + C::kM > tile.end_row, last_column = tile.first_column + C::kN > params.p.n;
    int const expected = C::kSeparateProducers ? params.weights.boxes[last_column] * kGroupDepth
                                               : bytes_of(params.tokens.boxes[last_row], last_column);
    if (!elect_one()) return early;
    cute::prefetch_tma_descriptor(&params.tokens.maps[last_row]);
#pragma unroll 1
    for (int i = producer; i < early; i += C::kProducerWarps) {
      mbarrier_expect_tx(full + i * 8, expected);
      tma_load(weights + i * C::kWeightBytes, params.weights.maps[last_column], (steps.first + i) * kGroupDepth,
               tile.first_column, full + i * 8);
    }
    return early;
  }

  // The smallest box that holds a tile's tokens.
  struct TokenBox {
    CUtensorMap const& map;
    int rows;
  };
  __device__ TokenBox token_box(GroupwiseTile const& tile) const {
    if constexpr (C::kSmallM) {
      int const rows = tile.end_row - tile.first_row;
      if (params.has_experts && rows <= kFewRows) {
        int const i = (rows > kFewestRows) + (rows > 2 * kFewestRows);
        return {params.few_tokens[i], kFewestRows << i};
      }
    }
    bool const last_row = to_uniform(tile.first_row + C::kM > tile.end_row);
    return {params.tokens.maps[last_row], params.tokens.boxes[last_row]};
  }

  // Bytes per stage loaded by a warp that issues both operands.
  __device__ int bytes_of(int token_rows, bool last_column) const {
    int const scale_bytes = params.copies_scales ? params.tokens.boxes[0] * 4 : 0;
    return (token_rows + params.weights.boxes[last_column]) * kGroupDepth + scale_bytes;
  }

  // Every kProducerWarps-th K step. The first `early` ones have their weights.
  __device__ void run(int producer, int early) const {
    bool const copies_scales = params.copies_scales, producer_loads_scales = C::kProducerMayLoadScales && copies_scales;
    int const half = C::kMulticast ? warp_uniform(static_cast<int>(cute::block_rank_in_cluster())) : 0;
    int before = 0;  // steps of the tiles that are done
    Position<C> state(producer);
    GroupwiseScheduler<C> scheduler(params.p, params.tiles);
    for (GroupwiseTile tile; warp_uniform(scheduler.next(tile));) {
      KSteps const steps = k_range.of(tile);
      int const weight_row = to_uniform(tile.expert * params.p.n + tile.first_column),
                token_row = to_uniform(tile.first_row);
      TokenBox const of_tokens = token_box(tile);
      bool const last_column = to_uniform(tile.first_column + C::kN > params.p.n);
      bool const halves_tokens =
          C::kMulticast && to_uniform(tile.is_multicast && tile.first_row + C::kM <= tile.end_row);
      CUtensorMap const &token_map = of_tokens.map, &weight_map = params.weights.maps[last_column];
      int const expected = to_uniform(bytes_of(of_tokens.rows, last_column));
      WeightScales<C> const of_columns(params.p, tile);
      auto const issue = [&](int i) {
        int const step = steps.at(i, tile), column = step * kGroupDepth;
        SharedAddress const barrier = full + state.stage * 8, to_tokens = tokens + state.stage * C::kTokenBytes;
        bool const has_weights = C::kSmallM && before + i < early;
        float2 of_weights{};  // loaded while the stage empties
        if (!C::kTransposesD && producer_loads_scales) of_weights = of_columns.at(step);
        if (!has_weights) mbarrier_wait(empty + state.stage * 8, state.parity ^ 1);
        if (elect_one()) {
          if (!has_weights && !C::kProducerMayLoadScales) mbarrier_expect_tx(barrier, expected);
          if (halves_tokens) {
            load_half_multicast(to_tokens, half, column, token_row, barrier);
          } else {
            tma_load(to_tokens, token_map, column, token_row, barrier);
          }
          if (!has_weights) tma_load(weights + state.stage * C::kWeightBytes, weight_map, column, weight_row, barrier);
          SharedAddress const to_scales = scales + state.stage * (C::kStageScales * 4);
          if (copies_scales) tma_load(to_scales, params.scales, token_row, step, barrier);
          if (!C::kTransposesD && producer_loads_scales) store_shared_pair(to_scales + C::kM * 4, of_weights);
          if (C::kProducerMayLoadScales)
            mbarrier_expect_tx(barrier, expected);  // and the arrival releases the stored scales
        }
        state.advance(C::kProducerWarps);
      };
      int i = first_step_of<C>(producer, before);
      if constexpr (C::kMulticast) {
        constexpr int kTogether = 4;
#pragma unroll 1
        for (; i + kTogether <= steps.depth; i += kTogether) {
#pragma unroll
          for (int j = 0; j < kTogether; ++j) issue(i + j);
        }
      }
#pragma unroll 1
      for (; i < steps.depth; i += C::kProducerWarps) issue(i);
      before += steps.depth;
    }
    // The other CTA's warps still signal this one's empty barriers: shared memory must outlive that.
    for (int i = 0; C::kMulticast && i < C::kStages; ++i) {
      mbarrier_wait(empty + state.stage * 8, state.parity ^ 1);
      state.advance(1);
    }
  }

  // Moves a tile coordinate to a uniform register; with multicast only, as the first copies wait for it.
  static __device__ int to_uniform(int value) { return C::kMulticast ? warp_uniform(value) : value; }

  // Loads this CTA's half of the tokens into both CTAs.
  __device__ void load_half_multicast(SharedAddress to, int half, int column, int first_row,
                                      SharedAddress barrier) const {
    int const first = half * (C::kM / 2);
    tma_load_multicast(to + first * kGroupDepth, params.half, column, first_row + first, barrier);
  }

  // Every kProducerWarps-th K step of either tokens or weights, each with a pipeline of its own. Weights continue after
  // those that were issued early.
  __device__ void run_separate(bool of_tokens, int producer, int early) const {
    SharedAddress const to = of_tokens ? tokens : weights;
    int const bytes = of_tokens ? C::kTokenBytes : C::kWeightBytes;
    int const stages = of_tokens ? C::kTokenStages : C::kStages, first = of_tokens ? 0 : early;
    int before = 0;
    Position<C> state(producer),
        behind(producer);  // this step's stage, and the step that must release it
    GroupwiseScheduler<C> scheduler(params.p, params.tiles);
    for (GroupwiseTile tile; warp_uniform(scheduler.next(tile));) {
      KSteps const steps = k_range.of(tile);
      int const row = of_tokens ? tile.first_row : tile.expert * params.p.n + tile.first_column;
      bool const last_column = tile.first_column + C::kN > params.p.n;
      TokenBox const box =
          of_tokens ? token_box(tile) : TokenBox{params.weights.maps[last_column], params.weights.boxes[last_column]};
      CUtensorMap const& map = box.map;
      int const expected = box.rows * kGroupDepth;
#pragma unroll 1
      for (int i = first_step_of<C>(producer, before); i < steps.depth; i += C::kProducerWarps) {
        if (before + i >= stages) {
          mbarrier_wait(empty + behind.stage * 8, behind.parity);
          behind.advance(C::kProducerWarps);
        }
        if (before + i >= first && elect_one()) {
          mbarrier_expect_tx(full + state.stage * 8, expected);
          tma_load(to + (of_tokens ? state.token_stage() : state.stage) * bytes, map, steps.at(i, tile) * kGroupDepth,
                   row, full + state.stage * 8);
        }
        state.advance(C::kProducerWarps);
      }
      before += steps.depth;
    }
  }
};

}  // namespace epiloq::gemm
