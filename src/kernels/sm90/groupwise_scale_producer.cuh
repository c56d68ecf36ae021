#pragma once

// Scale warps, if the token producer does not load the scales: copy_all_scales (TMA, short K steps) or read_scales.

#include "kernels/common/ptx/cp_async.cuh"
#include "kernels/sm90/groupwise_producer.cuh"

namespace epiloq::gemm {

// A warp that loads all scales by TMA, if K steps are short and the operand producer has no time.
template <class C>
__device__ void copy_all_scales(TileProducer<C> const& loader, int producer) {
  constexpr int kWeightBytes = 2 * C::kQuad * 4;
  GroupwiseParams const& params = loader.params;
  int const bytes = params.tokens.boxes[0] * 4 + kWeightBytes;
  int before = 0;  // steps of the tiles that are done
  Position<C> state(producer);
  GroupwiseScheduler<C> scheduler(params.p, params.tiles);
  for (GroupwiseTile tile; warp_uniform(scheduler.next(tile));) {
    KSteps const steps = loader.k_range.of(tile);
    int const row = tile.first_column / kBlockColumns;  // there is one expert
#pragma unroll 1
    for (int i = first_step_of<C>(producer, before); i < steps.depth; i += C::kProducerWarps) {
      int const step = steps.at(i, tile);
      SharedAddress const barrier = loader.full + state.stage * 8,
                          to = loader.scales + state.stage * (C::kStageScales * 4);
      mbarrier_wait(loader.empty + state.stage * 8, state.parity ^ 1);
      if (elect_one()) {
        mbarrier_expect_tx(barrier, bytes);
        tma_load(to, params.scales, tile.first_row, step, barrier);
        tma_load(to + C::kM * 4, params.weight_scales, step / C::kQuad * C::kQuad, row, barrier);
      }
      state.advance(C::kProducerWarps);
    }
    before += steps.depth;
  }
}

// Warps that load scales of any layout, four bytes at a time (cp.async). `own` is the thread's first row. Spread over
// the schedulers, as they compete with consumer warps.
template <class C>
__device__ void read_scales(GroupwiseParams const& params, typename C::Shared const& shared, KRange<C> const& k_range,
                            int producer, int own) {
  constexpr int kTogether = 32 * C::kScaleWarps;
  constexpr int kTokenIterations = (C::kM + kTogether - 1) / kTogether;
  constexpr int kWeightIterations = (C::kWeightScales + kTogether - 1) / kTogether;
  auto const& p = params.p;
  int const own_weight = kTogether - 1 - own;  // the warp with fewer rows begins
  SharedAddress const full = in_register(shared_address(shared.full())),
                      empty = in_register(shared_address(shared.empty()));
  SharedAddress const tokens = in_register(shared_address(shared.scales(0) + own));
  SharedAddress const weights = in_register(shared_address(shared.scales(0) + C::kM + own_weight));
  int before = 0;  // steps of the tiles that are done
  Position<C> state(producer);
  GroupwiseScheduler<C> scheduler(p, params.tiles);
  for (GroupwiseTile tile; scheduler.next(tile);) {
    KSteps const steps = k_range.of(tile);
    unsigned token[kTokenIterations], weight[std::max(kWeightIterations, 1)];  // offsets
#pragma unroll
    for (int t = 0; t < kTokenIterations; ++t) {
      int const row = max(0, min(tile.first_row + own + kTogether * t, tile.end_row - 1));
      token[t] = (row >> p.scale_a.shift) * p.scale_a.stride_row;
    }
#pragma unroll
    for (int t = 0; t < kWeightIterations; ++t) {
      int const index = own_weight + kTogether * t, offset = C::kColumnScales ? index : index * (C::kN - 1);
      int const column = min(tile.first_column + offset, p.n - 1);
      weight[t] = tile.expert * p.scale_b_expert + (column >> p.scale_b.shift) * p.scale_b.stride_row;
    }
    for (int i = first_step_of<C>(producer, before); i < steps.depth; i += C::kProducerWarps) {
      int const step = steps.at(i, tile);
      mbarrier_wait(empty + state.stage * 8, state.parity ^ 1);
      SharedAddress const stage = state.stage * (C::kStageScales * 4);
#pragma unroll
      for (int t = 0; t < kTokenIterations; ++t) {
        if (own + kTogether * t >= C::kM) continue;
        cp_async4(tokens + stage + 4 * kTogether * t, p.scale_a.ptr + (token[t] + step * p.scale_a.stride_k));
      }
#pragma unroll
      for (int t = 0; t < kWeightIterations; ++t) {
        if (own_weight + kTogether * t >= C::kWeightScales) continue;
        cp_async4(weights + stage + 4 * kTogether * t, p.scale_b.ptr + (weight[t] + step * p.scale_b.stride_k));
      }
      mbarrier_arrive_cp_async(full + state.stage * 8);
      state.advance(C::kProducerWarps);
    }
    before += steps.depth;
  }
}

}  // namespace epiloq::gemm
