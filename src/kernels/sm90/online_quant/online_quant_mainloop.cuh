#pragma once

// Consumer warpgroups of the online_quant_mm GEMM: WGMMA main loop with FP32 promotion.

#include <type_traits>
#include <utility>

#include "kernels/common/device_code.cuh"
#include "kernels/common/ptx/ldmatrix.cuh"
#include "kernels/common/ptx/shared_memory.cuh"
#include "kernels/common/ptx/tf32.cuh"
#include "kernels/common/ptx/wgmma.cuh"
#include "kernels/sm90/online_quant/online_quant_tile.cuh"

namespace epiloq::gemm {

template <class T>
struct OnlineQuantSm90Mainloop {
  static constexpr int kSums = T::kTokens / 2;  // per thread
  static constexpr int kScales = kSums / T::kScaleParts;
  static constexpr int kProducts = T::kStep / 32;
  template <int kDepth, int kTokens = T::kTokens>
  using Shape = cute::Shape<cute::_64, cute::Int<kTokens>, cute::Int<kDepth>>;
  using Integers8 = decltype(cute::SM90::GMMA::ss_op_selector<std::int8_t, std::int8_t, std::int32_t, Shape<32>>());
  using Integers4 = decltype(cute::SM90::GMMA::rs_op_selector<std::int8_t, std::int8_t, std::int32_t, Shape<32>>());
  template <int kTokens>
  using Outer =
      decltype(cute::SM90::GMMA::rs_op_selector<cute::tfloat32_t, cute::tfloat32_t, float, Shape<8, kTokens>>());
  using State = typename T::State;

  // A warpgroup's addresses within the first stage, as descriptors and as 32-bit shared addresses.
  struct StageAddresses {
    SharedAddress full, empty, of_row;
    SharedAddress packed;  // of 4-bit weights: the 16 bytes that the lane passes to ldmatrix
    std::uint32_t weights, values, parts;
    std::uint32_t high_mask;  // what lanes that supply a parameter's low part subtract: its high part; 0 in others
    int group;
    bool releases, has_offsets;

    __device__ StageAddresses(typename T::Shared const& shared, OnlineQuantGemmProblem const& p, int group_, int thread)
        : full(warp_uniform(shared.full)),
          empty(warp_uniform(shared.empty)),
          of_row(in_register(shared.weight_parameters +
                             (group_ * T::kGroupRows + thread / 32 * 16 + thread % 32 / 4) * 4)),
          packed(in_register(shared.weights + (group_ * T::kGroupRows + thread / 32 * 16 + thread % 8) * T::kRowBytes +
                             ((thread % 32 / 8 ^ thread % 8 / 2) << 4))),
          weights(warp_uniform(swizzled_address(shared.weights + group_ * T::kGroupRows * T::kStep))),
          values(warp_uniform(swizzled_address(shared.values))),
          parts(warp_uniform(swizzled_address(shared.parts))),
          high_mask(in_register(thread % 4 >= 2 ? kTf32Bits : 0)),
          group(group_),
          releases(thread % 32 == 0),
          has_offsets(p.kinds == T::kKinds) {}
  };

  // Weight rows r and r + 8: the scale, the factors of the tokens' other two parameter lines if the stage brings them,
  // and packed 4-bit values.
  struct Rows {
    float scale[2], added[2][2];
    unsigned packed[2][4];
  };
  template <bool kAdds>
  static __device__ __forceinline__ void read(Rows& rows, StageAddresses const& of, State const& at) {
    mbarrier_wait(of.full + at.stage * 8, at.phase);
    SharedAddress const row = of.of_row + at.stage * T::kWeightParameters;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      constexpr int kEight = 8 * 4, kLine = T::kRows * 4;
      rows.scale[h] = load_shared(row + h * kEight);
      if constexpr (kAdds) {
        rows.added[0][h] = load_shared(row + kLine + h * kEight);
        rows.added[1][h] = load_shared(row + 2 * kLine + h * kEight);
      }
    }
    // As in sm80/online_quant_gemm.cuh, with TMA's 64-byte swizzle. Eight rows further the pattern repeats.
    if constexpr (T::kBits == 4) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        ldmatrix_x4(rows.packed[h], of.packed + at.stage * T::kWeights + h * 8 * T::kRowBytes);
      }
    }
  }

  template <class Operand>
  static __device__ __forceinline__ void fence_one(Operand& operand) {
    if constexpr (std::is_array_v<Operand>) {
      [&]<std::size_t... kIndices>(std::index_sequence<kIndices...>) {
        (cute::warpgroup_fence_operand(operand[kIndices]), ...);
      }(std::make_index_sequence<std::extent_v<Operand>>{});
    } else {
      cute::warpgroup_fence_operand(operand);
    }
  }
  template <class... Operands>
  static __device__ __forceinline__ void fence(Operands&... operands) {
    (fence_one(operands), ...);
  }

  // Left operands. Parameters are 64 x 8: rows r and r + 8 of columns lane % 4 and lane % 4 + 4; of four columns the
  // first two are the high part and the others the low part. 4-bit values are in the upper halves of bytes: int8 of 16
  // times the value.
  struct Factors {
    std::uint32_t scales[4], added[4];
    std::uint32_t weights[kProducts][4];

    // Scales have four columns; the zeros are kept in registers, or they would be rewritten for every block.
    __device__ Factors() { scales[2] = in_register(0), scales[3] = in_register(0); }
  };
  // Tensor cores ignore the bits that TF32 lacks, so a parameter is its own high part and the remainder its low part;
  // the error is at most 2^-21 relative.
  template <bool kAdds>
  static __device__ __forceinline__ void split(Factors& factors, Rows const& rows, StageAddresses const& of) {
    auto const part = [&](float x) {
      return __float_as_uint(__fsub_rn(x, __uint_as_float(__float_as_uint(x) & of.high_mask)));
    };
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      factors.scales[h] = part(rows.scale[h] * (T::kBits == 4 ? 0.0625f : 1.f));
      if constexpr (kAdds) {
        factors.added[h] = part(rows.added[0][h]);
        factors.added[2 + h] = part(rows.added[1][h]);
      }
    }
    if constexpr (T::kBits == 4) {
      constexpr unsigned kHigh = 0xf0f0f0f0u;
#pragma unroll
      for (int i = 0; i < kProducts; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          factors.weights[i][h] = rows.packed[h][i] << 4 & kHigh;
          factors.weights[i][2 + h] = rows.packed[h][i] & kHigh;
        }
      }
      fence(factors.weights[0], factors.weights[1], factors.weights[2], factors.weights[3]);
    }
    fence(factors.scales[0], factors.scales[1]);
    if constexpr (kAdds) fence(factors.added);
  }

  // The products of a quantisation block and their factors, one part at a time.
  struct Block {
    std::uint32_t products[kSums];
    float scales[kScales];
  };

  // With the left operand in registers.
  template <class Instruction, class Sum, int kCount>
  static __device__ __forceinline__ void multiply(std::uint32_t const (&a)[4], std::uint64_t b, Sum (&sums)[kCount],
                                                  bool add) {
    using cute::SM90::GMMA::ScaleOut;
    [&]<std::size_t... kIndices>(std::index_sequence<kIndices...>) {
      Instruction::fma(a[0], a[1], a[2], a[3], b, sums[kIndices]..., add ? ScaleOut::One : ScaleOut::Zero);
    }(std::make_index_sequence<kCount>{});
  }

  // scale_w scale_x of some tokens: of eight columns four are zeros on the left, and the tokens' own again on the
  // right.
  static __device__ __forceinline__ void begin_scales(Block& block, Factors const& factors, std::uint32_t parts,
                                                      int part) {
    auto const tokens = parts + part * (T::kPlane / T::kScaleParts >> 4);
    multiply<Outer<T::kTokens / T::kScaleParts>>(factors.scales, planes_descriptor(tokens, 0), block.scales, false);
  }

  // Issues a block's products, the first of their scales, and the offsets' part. With ping-pong the other warpgroup
  // goes next: it promotes while these are in flight.
  template <bool kAdds>
  static __device__ __forceinline__ void begin(float (&sums)[kSums], Block& block, Factors& factors,
                                               StageAddresses const& of, State const& at) {
    auto const weights = of.weights + at.stage * (T::kWeights >> 4);
    auto const values = of.values + at.stage * (T::kValues >> 4);
    auto const parts = of.parts + at.stage * (T::kTokenParts >> 4);
    fence(block.products, block.scales, sums);
    if constexpr (T::kPingpong) order_wait(of.group);
    cute::warpgroup_arrive();
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
      constexpr int kDepth = 32 >> 4;  // in units of a descriptor's address
      auto const tokens = descriptor_of(values + i * kDepth);
      if constexpr (T::kBits == 4) {
        multiply<Integers4>(factors.weights[i], tokens, block.products, i > 0);
      } else {
        wgmma_fma<Integers8>(descriptor_of(weights + i * kDepth), tokens, block.products, i > 0,
                             std::make_index_sequence<kSums>{});
      }
    }
    begin_scales(block, factors, parts, 0);
    cute::warpgroup_commit_batch();
    if constexpr (kAdds) {
      cute::warpgroup_arrive();
      multiply<Outer<T::kTokens>>(factors.added, planes_descriptor(parts + (T::kPlane >> 4), T::kPlane), sums, true);
      cute::warpgroup_commit_batch();
    }
    if constexpr (T::kPingpong) order_arrive(of.group);
  }

  // Waits for the issued products and promotes all but the last part.
  static __device__ __forceinline__ void finish(float (&sums)[kSums], Block& block, Factors& factors,
                                                StageAddresses const& of, State const& at) {
    cute::warpgroup_wait<0>();
    fence(block.products, block.scales, sums);
    if constexpr (T::kScaleParts > 1) {
      promote(sums, block, 0);
      fence(block.products, block.scales, sums, factors.scales[0], factors.scales[1]);
      cute::warpgroup_arrive();
      begin_scales(block, factors, of.parts + at.stage * (T::kTokenParts >> 4), 1);
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<0>();
      fence(block.products, block.scales, sums);
    }
    release(of, at);
  }
  static __device__ __forceinline__ void release(StageAddresses const& of, State const& at) {
    __syncwarp();
    if (of.releases) mbarrier_arrive(of.empty + at.stage * 8);
  }
  static __device__ __forceinline__ void promote(float (&sums)[kSums], Block const& block, int part) {
#pragma unroll
    for (int i = 0; i < kScales; ++i) {
      float& sum = sums[part * kScales + i];
      sum = fmaf(static_cast<float>(static_cast<int>(block.products[part * kScales + i])), block.scales[i], sum);
    }
  }

  // A tile's quantisation blocks. The next one's parameters are loaded while wgmma is in flight and split during the
  // last promotion.
  template <bool kAdds, bool kNextAdds>
  static __device__ __forceinline__ void sum_block(float (&sums)[kSums], Block& block, Rows& rows, Factors& factors,
                                                   StageAddresses const& of, State& at, bool has_next) {
    begin<kAdds>(sums, block, factors, of, at);
    State const behind = at;
    at.advance();
    if (has_next) read<kNextAdds>(rows, of, at);
    finish(sums, block, factors, of, behind);
    split<kNextAdds>(factors, rows, of);
    promote(sums, block, T::kScaleParts - 1);
  }
  // Every block adds its own offsets' part, or the first of two adds both.
  template <bool kAllAdd>
  static __device__ __forceinline__ void sum_blocks(float (&sums)[kSums], StageAddresses const& of, State& at,
                                                    int steps) {
    Block block;
    Rows rows;
    Factors factors;
    read<true>(rows, of, at);
    split<true>(factors, rows, of);
#pragma unroll 1
    for (;;) {
      sum_block<true, kAllAdd>(sums, block, rows, factors, of, at, steps > 1);
      if (--steps == 0) break;
      if constexpr (kAllAdd) continue;
      sum_block<kAllAdd, true>(sums, block, rows, factors, of, at, steps > 1);
      if (--steps == 0) break;
    }
  }
  static __device__ __forceinline__ void sum(float (&sums)[kSums], StageAddresses const& of, State& at, int steps) {
    if (steps == 0) return;
    if (of.has_offsets) {
      sum_blocks<true>(sums, of, at, steps);
    } else {
      sum_blocks<false>(sums, of, at, steps);
    }
  }

  // Ping-pong: warpgroups alternate, so that one's products overlap the other's promotion.
  static constexpr int kFirstOrderBarrier = 1 + T::kGroups, kBoth = T::kGroups * T::kGroupThreads;
  static __device__ __forceinline__ void order_wait(int group) {
    asm volatile("bar.sync %0, %1;" ::"r"(kFirstOrderBarrier + group), "n"(kBoth) : "memory");
  }
  static __device__ __forceinline__ void order_arrive(int group) {
    asm volatile("bar.arrive %0, %1;" ::"r"(kFirstOrderBarrier + 1 - group), "n"(kBoth) : "memory");
  }

  // Two planes of 16 bytes per row, as wgmma reads them without a swizzle: eight TF32 columns.
  static __device__ __forceinline__ std::uint64_t planes_descriptor(std::uint32_t address, int apart) {
    constexpr std::uint32_t kEightRows = 8 * 16;
    std::uint64_t descriptor;
    asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(address | apart >> 4 << 16), "n"(kEightRows >> 4));
    return descriptor;
  }
};

}  // namespace epiloq::gemm
