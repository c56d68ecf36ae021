#pragma once

// What fills the group-wise kernel's stages: TMA for tokens and weights, small copies for scales.

#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "gemm/sm90_groupwise_tile.cuh"

namespace epiloq::gemm {

// A thread that asks TMA for tokens and weights.
template <class C>
struct TileReader {
  GroupwiseParams const& params;
  typename C::Shared const& shared;
  int rank = C::kCluster > 1 ? static_cast<int>(cute::block_rank_in_cluster()) : 0;

  static constexpr bool kSharesTokens = C::kShare == Share::kTokens, kSharesWeights = C::kShare == Share::kWeights;
  static constexpr int kWeightPart = kSharesWeights ? C::kN / C::kCluster : C::kN;
  static constexpr auto kHint = static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);

  template <bool kToAll>
  static __device__ void copy(CUtensorMap const& map, std::uint64_t* signal, void* target, int k, int row) {
    if constexpr (kToAll) {
      constexpr std::uint16_t kEverybody = (1 << C::kCluster) - 1;
      cute::SM90_TMA_LOAD_MULTICAST_2D::copy(&map, signal, kEverybody, kHint, target, k, row);
    } else {
      cute::SM90_TMA_LOAD_2D::copy(&map, signal, kHint, target, k, row);
    }
  }

  // Asks L2 for the first weights. Harmless before the previous kernel has finished, even if it writes them: L2 is
  // where its writes arrive. (Not where experts' rows are known only then.)
  __device__ void prefetch() const {
    constexpr int kBytes = 64 * 1024;
    if (params.p.offs != nullptr || params.p.masked_m != nullptr) return;
    GroupwiseScheduler<C> scheduler(params.p);
    GroupwiseTile tile;
    if (!scheduler.next(tile)) return;
    int const weight_row = tile.first_column + (kSharesWeights ? rank * kWeightPart : 0);
    for (int k = 0; k < min(params.p.k, kBytes / C::kN); k += kGroupDepth) {
      cute::SM90_TMA_LOAD_2D::PREFETCH::copy(&params.weights, k, weight_row);
    }
  }

  __device__ void run(int reader) const {
    int const token_part = kSharesTokens ? params.token_box / C::kCluster : params.token_box;
    int const token_first = kSharesTokens ? rank * token_part : 0;
    int const weight_first = kSharesWeights ? rank * kWeightPart : 0;
    int const depth = (params.p.k + kGroupDepth - 1) / kGroupDepth;
    int step = 0;
    RingPosition<C> ring(reader);
    GroupwiseScheduler<C> scheduler(params.p);
    for (GroupwiseTile tile; scheduler.next(tile);) {
      int const weight_row = tile.expert * params.p.n + tile.first_column;
      for (int i = 0; i < depth; ++i, ++step) {
        if (step % C::kReaders != reader) continue;
        auto& full = shared.full()[ring.stage];
        auto* const signal = reinterpret_cast<std::uint64_t*>(&full);
        shared.empty()[ring.stage].wait(ring.parity ^ 1);
        full.arrive_and_expect_tx(params.token_box * kGroupDepth + C::kWeightBytes);
        copy<kSharesTokens>(params.tokens, signal, shared.tokens(ring.stage) + token_first * kGroupDepth,
                            i * kGroupDepth, tile.first_row + token_first);
        copy<kSharesWeights>(params.weights, signal, shared.weights(ring.stage) + weight_first * kGroupDepth,
                             i * kGroupDepth, weight_row + weight_first);
        ring.advance(C::kReaders);
      }
    }
  }
};

// A warp that fetches scales, four bytes at a time and so from any layout, into the stage of their tiles.
template <class C>
__device__ void read_scales(GroupwiseParams const& params, typename C::Shared const& shared, int reader, int lane) {
  auto const& p = params.p;
  int const depth = (p.k + kGroupDepth - 1) / kGroupDepth;
  int step = 0;
  RingPosition<C> ring(reader);
  GroupwiseScheduler<C> scheduler(p);
  for (GroupwiseTile tile; scheduler.next(tile);) {
    constexpr int kTokenTurns = C::kM / 32, kWeightTurns = (C::kWeightScales + 31) / 32;
    unsigned token[kTokenTurns], weight[kWeightTurns];  // offsets
    for (int t = 0; t < kTokenTurns; ++t) {
      int const row = max(0, min(tile.first_row + lane + 32 * t, tile.end_row - 1));
      token[t] = (row >> p.scale_a.shift) * p.scale_a.stride_row;
    }
    for (int t = 0; t < kWeightTurns; ++t) {
      int const offset = C::kColumnScales ? lane + 32 * t : (lane == 0 ? 0 : C::kN - 1);
      int const column = min(tile.first_column + offset, p.n - 1);
      weight[t] = tile.expert * p.scale_b_expert + (column >> p.scale_b.shift) * p.scale_b.stride_row;
    }
    for (int i = 0; i < depth; ++i, ++step) {
      if (step % C::kReaders != reader) continue;
      shared.empty()[ring.stage].wait(ring.parity ^ 1);
      std::uint32_t const target = cute::cast_smem_ptr_to_uint(shared.scales(ring.stage));
      auto const copy = [&](int index, float const* source) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target + 4 * index), "l"(source) : "memory");
      };
      for (int t = 0; t < kTokenTurns; ++t) copy(lane + 32 * t, p.scale_a.ptr + (token[t] + i * p.scale_a.stride_k));
      for (int t = 0; t < kWeightTurns; ++t) {
        if (lane + 32 * t < C::kWeightScales)
          copy(C::kM + lane + 32 * t, p.scale_b.ptr + (weight[t] + i * p.scale_b.stride_k));
      }
      cutlass::arch::cpasync_barrier_arrive_noinc(reinterpret_cast<std::uint64_t*>(shared.full() + ring.stage));
      ring.advance(C::kReaders);
    }
  }
}

}  // namespace epiloq::gemm
