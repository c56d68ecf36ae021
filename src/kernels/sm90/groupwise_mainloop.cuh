#pragma once

// Main loop of a consumer warpgroup of the groupwise GEMM (groupwise_gemm.cuh).
//
// A stage, filled by the producer, holds kM tokens and kN rows of weights, 128 bytes of K each, both K-major in the
// 128-byte swizzle, and their scales. WGMMA reads both from shared memory: 64 tokens a round (the M of its tile), all
// kN columns. FP8 products of one stage are promoted, scaled, to FP32 sums in registers; int8 accumulates in int32
// over all of K. Of three loops a configuration takes one: `sum_in_place` (int8), `sum_serial` (one product at a time,
// promoted while other warpgroups multiply) and `sum_overlapped` (promotion beside the warpgroup's own next product).
//
// Invariants: a stage is read only after its full barrier has the phase's parity, and released, by one arrival per
// warp of its K group and CTA that writes it, only after the last wgmma that reads it has finished and all lanes have
// read their scales.

#include <numeric>
#include <utility>

#include "kernels/common/ptx/cluster.cuh"
#include "kernels/common/ptx/cta.cuh"
#include "kernels/common/ptx/wgmma.cuh"
#include "kernels/sm90/groupwise_tile.cuh"

namespace epiloq::gemm {

template <class C>
struct GroupwiseMainloop {
  static constexpr int kSums = C::kSums;
  static constexpr int kInstructionDepth = 32;
  static constexpr int kWarpgroupBytes = 64 * kGroupDepth, kRoundBytes = C::kRoundRows * kGroupDepth;  // of tokens
  using Element = typename C::Element;
  using Sum = typename C::Sum;
  using Instruction =
      decltype(cute::SM90::GMMA::ss_op_selector<Element, Element, std::conditional_t<C::kExact, std::int32_t, float>,
                                                cute::Shape<cute::_64, cute::Int<C::kColumns>, cute::_32>>());

  // A thread's addresses within the first stage, as 32-bit shared addresses; those for wgmma and the barriers stay in
  // uniform registers, as there is no time to compute them between two products.
  struct StageAddresses {
    SharedAddress full, empty;                // the latter in the CTA that this lane signals
    SharedAddress own_empty, pair_empty;      // this CTA's; with multicast, that of the CTA to signal
    std::uint32_t tokens, weights;            // as descriptors: 64 rows of each round; all weights
    SharedAddress row_scales, column_scales;  // of the thread's first row and columns
    bool releases;                            // whether this lane releases stages
    int first_step;                           // K step
    bool in_quads;                            // weight scales of four K steps lie together

    __device__ StageAddresses(GroupwiseParams const& params, typename C::Shared const& shared, int group_m, int group_k,
                              int warp, int lane, int first)
        : full(warp_uniform(shared_address(shared.full()))),
          empty(warp_uniform(shared_address(shared.empty()))),
          own_empty(empty),
          pair_empty(empty),
          tokens(warp_uniform(swizzled_address(shared_address(shared.tokens(0)) + group_m * kWarpgroupBytes))),
          weights(warp_uniform(swizzled_address(shared_address(shared.weights(0))))),
          row_scales(in_register(shared_address(shared.scales(0)) + (group_m * 64 + warp * 16 + lane / 4) * 4)),
          column_scales(
              in_register(shared_address(shared.scales(0)) + (C::kM + (C::kColumnScales ? 2 * (lane % 4) : 0)) * 4)),
          releases(lane < (C::kMulticast ? 2 : 1)),
          first_step(first + group_k),
          in_quads(params.copies_all_scales) {
      if (C::kMulticast && params.tiles.multicast) {
        int const rank = static_cast<int>(cute::block_rank_in_cluster());
        own_empty = in_register(dsmem_address(empty, rank)),
        pair_empty = in_register(dsmem_address(empty, rank ^ (lane & 1)));
      }
    }

    // Two lanes release a stage: one in each CTA, or both in this one.
    __device__ void select_empty(bool is_alone) { empty = is_alone ? own_empty : pair_empty; }
  };

  // Scales of a stage: of rows r and r + 8 of each round; of the first and last column, or of every column. Loaded
  // after wgmma has been issued, by `asm volatile`: ptxas would wait for movable loads between the first and the second
  // wgmma.
  struct Factors {
    float row[C::kRounds][2];
    float2 columns[C::kColumnScales ? kSums / 4 : 1];
  };

  static __device__ __forceinline__ void read(Factors& factors, StageAddresses const& addresses, Position<C> const& at,
                                              int step) {
    if constexpr (C::kPerRowScales) return;
    SharedAddress const stage = at.stage * (C::kStageScales * 4);
#pragma unroll
    for (int i = 0; i < 2 * C::kRounds; ++i) {
      factors.row[i / 2][i % 2] = load_shared(addresses.row_scales + stage + (i / 2 * C::kRoundRows + i % 2 * 8) * 4);
    }
    if constexpr (C::kTransposesD) return;
    if constexpr (C::kMayCopyAllScales) {
      SharedAddress const first = addresses.column_scales + stage + (addresses.in_quads ? step % C::kQuad * 4 : 0);
      factors.columns[0] = {load_shared(first), load_shared(first + (addresses.in_quads ? C::kQuad * 4 : 4))};
      return;
    }
    constexpr int kColumnPairs = sizeof(factors.columns) / sizeof(float2);
#pragma unroll
    for (int j = 0; j < kColumnPairs; ++j)
      factors.columns[j] = load_shared_pair(addresses.column_scales + stage + j * 8 * 4);
  }

  static __device__ __forceinline__ void wait(StageAddresses const& addresses, Position<C> const& at) {
    mbarrier_wait(addresses.full + at.stage * 8, at.parity);
  }

  // Issues the products of one round of a stage, four wgmma of 32 bytes of K, accumulating or from zero. Descriptors
  // count in units of 16 bytes.
  static __device__ __forceinline__ void issue(Sum (&product)[kSums], StageAddresses const& addresses,
                                               Position<C> const& at, int round, bool accumulates) {
    auto const a = addresses.tokens + at.token_stage() * (C::kTokenBytes >> 4) + round * (kRoundBytes >> 4);
    auto const b = addresses.weights + at.stage * (C::kWeightBytes >> 4);
    fence(product);
    cute::warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < kGroupDepth / kInstructionDepth; ++k) {
      constexpr int kStep = kInstructionDepth >> 4;
      wgmma_fma<Instruction>(descriptor_of(a + k * kStep), descriptor_of(b + k * kStep), product, accumulates || k != 0,
                             std::make_index_sequence<kSums>{});
    }
    cute::warpgroup_commit_batch();
  }

  // Waits until at most kUnderWay products are in flight.
  template <int kUnderWay>
  static __device__ __forceinline__ void await(Sum (&product)[kSums]) {
    cute::warpgroup_wait<kUnderWay>();
    fence(product);
  }

  // Releases a stage once all lanes have read their scales.
  static __device__ __forceinline__ void release(StageAddresses const& addresses, Position<C> const& at) {
    __syncwarp();
    if (!addresses.releases) return;
    if constexpr (C::kMulticast) {
      mbarrier_arrive_cluster(addresses.empty + at.stage * 8);
    } else {
      mbarrier_arrive(addresses.empty + at.stage * 8);
    }
  }

  // FP32 promotion: sums += scale_a scale_b product.
  static __device__ __forceinline__ void promote(float (&sums)[kSums], float const (&product)[kSums],
                                                 Factors const& factors, int round, int boundary) {
    float const(&row)[2] = factors.row[round];
    if constexpr (C::kPerRowScales) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] += product[i];
    } else if constexpr (C::kTransposesD) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] = fmaf(row[i / 2 % 2], product[i], sums[i]);
    } else if constexpr (C::kColumnScales) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        float2 const& column = factors.columns[i / 4];
        sums[i] = fmaf(row[i / 2 % 2] * (i % 2 == 0 ? column.x : column.y), product[i], sums[i]);
      }
    } else {
      // Columns up to the boundary belong to one 128-column scale group, the others to the next.
      constexpr int kTogether = std::gcd(C::kN, kBlockColumns);
#pragma unroll
      for (int column = 0; column < C::kN; column += kTogether) {
        bool const in_first = kTogether == C::kN || column < boundary;
        float const of_weights = in_first ? factors.columns[0].x : factors.columns[0].y;
        float const scale[2] = {row[0] * of_weights, row[1] * of_weights};
#pragma unroll
        for (int i = column / 2; i < (column + kTogether) / 2; ++i) {
          sums[i] = fmaf(scale[i / 2 % 2], product[i], sums[i]);
        }
      }
    }
  }

  // Multiplies `steps` stages, every kKGroups-th. With deferred stores and more steps than kParts, `store_part` is
  // called at least kParts times while wgmma is in flight, `fetch_next_tile` once, and `fill` once the sums of the
  // first round are complete.
  template <class StorePart, class FetchNextTile, class Fill>
  static __device__ __forceinline__ void sum(Sum (&sums)[C::kRounds][kSums], StageAddresses const& addresses,
                                             Position<C> at, int steps, int boundary, StorePart store_part,
                                             FetchNextTile fetch_next_tile, Fill fill) {
    if (C::kKGroups > 1 && steps <= 0) return;
    if constexpr (C::kExact) {
      sum_in_place(sums[0], addresses, at, steps, store_part, fetch_next_tile);
    } else if constexpr (C::kOverlaps) {
      sum_overlapped(sums[0], addresses, at, steps, boundary);
    } else {
      sum_serial(sums, addresses, at, steps, boundary, store_part, fetch_next_tile, fill);
    }
  }

  // int8: accumulates in place; a stage is released once the next one's product has been issued.
  template <class StorePart, class FetchNextTile>
  static __device__ __forceinline__ void sum_in_place(Sum (&sums)[kSums], StageAddresses const& addresses,
                                                      Position<C> at, int steps, StorePart store_part,
                                                      FetchNextTile fetch_next_tile) {
    Position<C> behind = at;
    for (int i = 0; i < steps; ++i) {
      wait(addresses, at);
      issue(sums, addresses, at, 0, true);
      at.advance(C::kKGroups);
      store_part();
      if (i == 0) continue;
      await<1>(sums);
      release(addresses, behind);
      behind.advance(C::kKGroups);
    }
    if constexpr (C::kDefersStores) fetch_next_tile();
    await<0>(sums);
    release(addresses, behind);
  }

  // One product at a time, promoted while other warpgroups multiply. The loop is unrolled so that ptxas polls the next
  // full barrier before the promotion and hides its latency; one step in four stores a part of the previous tile.
  template <class StorePart, class FetchNextTile, class Fill>
  static __device__ __forceinline__ void sum_serial(float (&sums)[C::kRounds][kSums], StageAddresses const& addresses,
                                                    Position<C> at, int steps, int boundary, StorePart store_part,
                                                    FetchNextTile fetch_next_tile, Fill fill) {
    float product[kSums];
    Factors factors;
    auto const run_step = [&](int step, auto beside_first, auto beside_last) {
      wait(addresses, at);
#pragma unroll
      for (int round = 0; round < C::kRounds; ++round) {
        bool const is_last = round == C::kRounds - 1;
        issue(product, addresses, at, round, false);
        if (round == 0) read(factors, addresses, at, addresses.first_step + step * C::kKGroups);
        if (round == 0) beside_first();
        if (is_last) beside_last();
        await<0>(product);
        if (is_last) release(addresses, at);
        promote(sums[round], product, factors, round, boundary);
      }
      at.advance(C::kKGroups);
    };
    auto const nothing = [] {};
    constexpr int kTogether = 4;
    int step = 0;
    if constexpr (!C::kDefersStores) {
#pragma unroll kTogether
      for (; step < steps; ++step) run_step(step, nothing, nothing);
    } else {
#pragma unroll 1
      for (; step + kTogether + C::kParts <= steps; step += kTogether) {
        run_step(step, nothing, store_part);
#pragma unroll
        for (int i = 1; i < kTogether; ++i) run_step(step + i, nothing, nothing);
      }
#pragma unroll 1
      for (; step < steps - 1; ++step) run_step(step, nothing, store_part);
      run_step(step, fetch_next_tile, fill);
    }
  }

  // Promotes one product while the next is in flight. Without the last branch ptxas 13.0 serialises wgmma (C7514).
  // Unrolled as above, except for per-row scales.
  static __device__ __forceinline__ void sum_overlapped(float (&sums)[kSums], StageAddresses const& addresses,
                                                        Position<C> at, int steps, int boundary) {
    struct Product {
      float sums[kSums];
      Factors factors;
    } one, other;
    Position<C> ahead = at;
    auto const issue_next = [&](Product& product) {
      wait(addresses, ahead);
      issue(product.sums, addresses, ahead, 0, false);
      read(product.factors, addresses, ahead, 0);
      ahead.advance(1);
    };
    auto const promote_next = [&]<int kUnderWay>(Product& product, std::integral_constant<int, kUnderWay>) {
      await<kUnderWay>(product.sums);
      release(addresses, at);
      promote(sums, product.sums, product.factors, 0, boundary);
      at.advance(1);
    };
    constexpr std::integral_constant<int, 1> kOne{};
    constexpr std::integral_constant<int, 0> kNone{};
    issue_next(one);
    int left = steps - 1;
    constexpr int kTogether = C::kPerRowScales ? 1 : 2;
#pragma unroll kTogether
    for (; left >= 2; left -= 2) {
      issue_next(other);
      promote_next(one, kOne);
      issue_next(one);
      promote_next(other, kOne);
    }
    if (left == 1) {
      issue_next(other);
      promote_next(one, kOne);
      promote_next(other, kNone);
    } else {
      promote_next(one, kNone);
    }
  }

  static __device__ __forceinline__ void fence(Sum (&sums)[kSums]) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) cute::warpgroup_fence_operand(sums[i]);
  }

  // Reduction between the two warpgroups along K: each sends half of the sums to the other; the first keeps rows r of
  // each warp's 16, the second rows r + 8, and both run the epilogue. It also synchronises all warps, because column
  // operands are loaded cooperatively and the previous tile's may be overwritten afterwards. `again`: not the CTA's
  // first tile, so the last one's sums may still be being read.
  static __device__ __forceinline__ void reduce(Sum (&of_rows)[C::kRowSums], Sum const (&sums)[kSums], Sum* partial,
                                                int group, bool again) {
    static_assert(C::kKGroups == 2);
    constexpr int kBarrier = 1, kEverybody = 128 * C::kKGroups, kVectors = C::kRowSums / 4;
    int const thread = threadIdx.x % 128;
    auto const slot = [&](int of_group, int vector) {
      return reinterpret_cast<uint4*>(partial) + (of_group * kVectors + vector) * 128 + thread;
    };
    alignas(16) Sum others[C::kRowSums] = {};
#pragma unroll
    for (int i = 0; i < kSums / 2; ++i) {
      Sum const first = sums[i / 2 * 4 + i % 2], second = sums[i / 2 * 4 + 2 + i % 2];
      of_rows[i] = group == 0 ? first : second;
      others[i] = group == 0 ? second : first;
    }
    if (again) named_barrier_sync<kBarrier, kEverybody>();
#pragma unroll
    for (int i = 0; i < kVectors; ++i) *slot(group ^ 1, i) = reinterpret_cast<uint4 const*>(others)[i];
    named_barrier_sync<kBarrier, kEverybody>();
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      uint4 const vector = *slot(group, i);
#pragma unroll
      for (int j = 0; j < 4 && 4 * i + j < kSums / 2; ++j)
        of_rows[4 * i + j] += reinterpret_cast<Sum const*>(&vector)[j];
    }
  }
};

}  // namespace epiloq::gemm
