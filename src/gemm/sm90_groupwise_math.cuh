#pragma once

// What empties the group-wise kernel's stages: wgmma, and sums in fp32, or of int8 in int32.

#include <utility>

#include "gemm/sm90_groupwise_tile.cuh"
#include "gemm/wgmma.cuh"

namespace epiloq::gemm {

template <class C>
struct GroupwiseMath {
  static constexpr int kSums = C::kN / 2;  // of a thread: rows r and r + 8, two neighbours of each 8 columns
  static constexpr int kInstructionDepth = 32;
  using Element = typename C::Element;
  using Sum = typename C::Sum;
  using Instruction =
      decltype(cute::SM90::GMMA::ss_op_selector<Element, Element, std::conditional_t<C::kExact, std::int32_t, float>,
                                                cute::Shape<cute::_64, cute::Int<C::kN>, cute::_32>>());

  struct Position {
    typename C::Shared const& shared;
    RingPosition<C> ring;
    int group_m, boundary, warp, lane;
    __device__ int first_row(int round) const { return (group_m * C::kRounds + round) * 64; }
  };

  // Starts to multiply a round of a stage: int8 onto the sums themselves.
  static __device__ __forceinline__ void begin(Sum (&product)[kSums], Position const& at, int round = 0) {
    int const stage = at.ring.stage;
    auto const* const tokens = at.shared.tokens(stage) + at.first_row(round) * kGroupDepth;
    std::uint64_t const a = swizzled_descriptor(cute::cast_smem_ptr_to_uint(tokens));
    std::uint64_t const b = swizzled_descriptor(cute::cast_smem_ptr_to_uint(at.shared.weights(stage)));
    if (round == 0) at.shared.full()[stage].wait(at.ring.parity);
    fence(product);
    cute::warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < kGroupDepth / kInstructionDepth; ++k) {
      constexpr int kStep = kInstructionDepth >> 4;
      multiply_once<Instruction>(a + k * kStep, b + k * kStep, product, C::kExact || k != 0,
                                 std::make_index_sequence<kSums>{});
    }
    cute::warpgroup_commit_batch();
  }

  // Once all but kUnderWay of what was begun is done: sums += scale_a scale_b product, and after the last round the
  // stage is given back.
  template <int kUnderWay>
  static __device__ __forceinline__ void finish(float (&sums)[kSums], float (&product)[kSums], Position const& at,
                                                int round = 0) {
    if constexpr (C::kWholeRows) {
      await<kUnderWay>(product, at, round);
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] += product[i];
    } else {
      finish_scaled<kUnderWay>(sums, product, at, round);
    }
  }

  template <int kUnderWay>
  static __device__ __forceinline__ void finish_scaled(float (&sums)[kSums], float (&product)[kSums],
                                                       Position const& at, int round) {
    float const* const scales = at.shared.scales(at.ring.stage);
    int const row = at.first_row(round) + at.warp * 16 + at.lane / 4;
    float const low = scales[row], high = scales[row + 8];
    if constexpr (C::kColumnScales) {
      float2 columns[kSums / 4];
#pragma unroll
      for (int j = 0; j < kSums / 4; ++j) {
        columns[j] = *reinterpret_cast<float2 const*>(scales + C::kM + 8 * j + 2 * (at.lane % 4));
      }
      await<kUnderWay>(product, at, round);
#pragma unroll
      for (int j = 0; j < kSums / 4; ++j) {
        add(sums + 4 * j, product + 4 * j, low * columns[j].x, low * columns[j].y, high * columns[j].x,
            high * columns[j].y);
      }
    } else {
      float const first = scales[C::kM], last = scales[C::kM + 1];
      await<kUnderWay>(product, at, round);
      // Columns up to the boundary belong to one block of 128 weights, the others to the next.
      constexpr int kTogether = std::gcd(C::kN, kGroupDepth);
#pragma unroll
      for (int column = 0; column < C::kN; column += kTogether) {
        float const scale = kTogether == C::kN || column < at.boundary ? first : last;
        float const s_low = low * scale, s_high = high * scale;
#pragma unroll
        for (int i = column / 2; i < (column + kTogether) / 2; i += 4) {
          add(sums + i, product + i, s_low, s_low, s_high, s_high);
        }
      }
    }
  }

  // Of int8: each stage is given back once the one after it is under way.
  static __device__ __forceinline__ void sum_in_place(Sum (&sums)[kSums], Position at, int steps) {
    Position behind = at;
    for (int i = 0; i < steps; ++i) {
      begin(sums, at);
      at.ring.advance(C::kKGroups);
      if (i == 0) continue;
      await<1>(sums, behind, 0);
      behind.ring.advance(C::kKGroups);
    }
    await<0>(sums, behind, 0);
  }

  // The next `steps` stages, every kKGroups-th of them.
  static __device__ __forceinline__ void sum(Sum (&sums)[C::kRounds][kSums], Position at, int steps) {
    if (steps <= 0) return;
    if constexpr (C::kExact) {
      sum_in_place(sums[0], at, steps);
    } else if constexpr (!C::kOverlaps) {
      float product[kSums];
      for (int i = 0; i < steps; ++i) {
#pragma unroll
        for (int round = 0; round < C::kRounds; ++round) {
          begin(product, at, round);
          finish<0>(sums[round], product, at, round);
        }
        at.ring.advance(C::kKGroups);
      }
    } else {
      sum_overlapped(sums, at, steps * C::kRounds);
    }
  }

  // One product is added up while the next, of the next round or stage, is under way.
  // Where rounds are two the number is even and the last branch never taken; without it ptxas 13.0 waits for each wgmma
  // (C7514).
  static __device__ __forceinline__ void sum_overlapped(float (&sums)[C::kRounds][kSums], Position at, int products) {
    constexpr int kLast = C::kRounds - 1;
    float product[kSums], other[kSums];  // of first rounds, of last ones
    Position ahead = at;
    auto const begin_next = [&](float (&target)[kSums], int round) {
      begin(target, ahead, round);
      if (round == kLast) ahead.ring.advance(1);
    };
    auto const finish_next = [&]<int kUnderWay>(float (&source)[kSums], int round,
                                                std::integral_constant<int, kUnderWay>) {
      finish<kUnderWay>(sums[round], source, at, round);
      if (round == kLast) at.ring.advance(1);
    };
    constexpr std::integral_constant<int, 1> kOne{};
    constexpr std::integral_constant<int, 0> kNone{};
    begin_next(product, 0);
    int left = products - 1;
    for (; left >= 2; left -= 2) {
      begin_next(other, kLast);
      finish_next(product, 0, kOne);
      begin_next(product, 0);
      finish_next(other, kLast, kOne);
    }
    if (left == 1) {
      begin_next(other, kLast);
      finish_next(product, 0, kOne);
      finish_next(other, kLast, kNone);
    } else {
      finish_next(product, 0, kNone);
    }
  }

  static __device__ __forceinline__ void fence(Sum (&product)[kSums]) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) cute::warpgroup_fence_operand(product[i]);
  }

  static __device__ __forceinline__ void add(float* sums, float const* product, float s0, float s1, float s2,
                                             float s3) {
    sums[0] = fmaf(s0, product[0], sums[0]);
    sums[1] = fmaf(s1, product[1], sums[1]);
    sums[2] = fmaf(s2, product[2], sums[2]);
    sums[3] = fmaf(s3, product[3], sums[3]);
  }

  template <int kUnderWay>
  static __device__ __forceinline__ void await(Sum (&product)[kSums], Position const& at, int round) {
    cute::warpgroup_wait<kUnderWay>();
    fence(product);
    if (round != C::kRounds - 1) return;
    __syncwarp();
    auto& empty = at.shared.empty()[at.ring.stage];
    if constexpr (C::kCluster == 1) {
      if (at.lane == 0) empty.arrive();
    } else {
      empty.arrive(at.lane, at.lane < C::kCluster);
    }
  }

  // Warpgroups that took turns along K meet in the first one, in a fixed order.
  static __device__ void meet(Sum (&sums)[kSums], Sum* partial, int group) {
    constexpr int kBarrier = 1, kEverybody = 128 * C::kKGroups;
    auto const wait = [] { asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kEverybody) : "memory"); };
    int const thread = threadIdx.x % 128;
    if (group > 0) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) partial[((group - 1) * kSums + i) * 128 + thread] = sums[i];
    }
    wait();
    if (group == 0) {
#pragma unroll
      for (int g = 1; g < C::kKGroups; ++g) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[i] += partial[((g - 1) * kSums + i) * 128 + thread];
      }
    }
    wait();
  }
};

}  // namespace epiloq::gemm
