#pragma once

// SM90: the weight-only WGMMA GEMM with FP4 weights (packed_fp4_mm), one matrix. Consumers multiply a code by its scale
// before the tensor cores, which T represents exactly, so that sums need no promotion.

#include "kernels/common/w4a16/convert_fp4.cuh"
#include "kernels/launch/fp4_wgmma.h"
#include "kernels/sm90/w4a16/w4a16_gemm.cuh"
#include "kernels/sm90/w4a16/w4a16_launch.cuh"

namespace epiloq::ops::weight_only_mm {

// MXFP4 in bfloat16: codes times powers of two, both of which bfloat16 represents. (A half has no exponents for them.)
// With scales of up to 1, one factor also makes values of patterns.
template <bool kIsLarge>
struct Mxfp4FoldedFragment {
  using T = __nv_bfloat16;
  using Scales = Fp4Scales<T, 4>;
  using Large = Mxfp4FoldedFragment<true>;
  static constexpr float kUnit = 1;

  struct Factor {
    Word low, high;  // of rows g and g + 8, in both halves
  };
  static __device__ __forceinline__ Word power(Word byte) {
    if constexpr (!kIsLarge) return Scales::factor(byte);
    constexpr Word kNanByte = 255, kNan = 0x7fff, kSmallest = 0x0040;  // 2^-127, subnormal
    Word const normal = byte == 0 ? kSmallest : byte << 7;
    return twice(byte == kNanByte ? kNan : normal);
  }
  static __device__ __forceinline__ Factor factor(Word bytes) { return {power(bytes & 0xff), power(bytes >> 8)}; }
  static __device__ __forceinline__ void make(Word (&a)[4], Word const* w, Factor const& factor) {
    E2M1<T>::patterns(a, w[0]);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      if constexpr (kIsLarge) a[p] = multiply_pairs(T{}, a[p], E2M1<T>::kToValues);
      a[p] = multiply_pairs(T{}, a[p], p % 2 == 0 ? factor.low : factor.high);
    }
  }
};

struct FactorParams : TileParams {
  float const* factor;  // of all sums; null: 1
};

// Integers: the kernel of 4-bit integers whose stages, barriers and sums this one shares.
template <class T, class Fragment_, int kGroups, int kMGroups, int kKGroups, int kTokens>
struct Fp4Wgmma : Wgmma<T, 4, kGroups, kMGroups, kKGroups, 1, kTokens, true, RowTokens<2, FactorParams>> {
  using Integers = Wgmma<T, 4, kGroups, kMGroups, kKGroups, 1, kTokens, true, RowTokens<2, FactorParams>>;
  using Fragment = Fragment_;
};

template <class T, class F, int kGroups, int kMGroups, int kKGroups, int kTokens>
struct WgmmaMainloop<Fp4Wgmma<T, F, kGroups, kMGroups, kKGroups, kTokens>>
    : WgmmaMainloop<typename Fp4Wgmma<T, F, kGroups, kMGroups, kKGroups, kTokens>::Integers,
                    WgmmaMainloop<Fp4Wgmma<T, F, kGroups, kMGroups, kKGroups, kTokens>>> {
  using C = Fp4Wgmma<T, F, kGroups, kMGroups, kKGroups, kTokens>;
  using Base = WgmmaMainloop<typename C::Integers, WgmmaMainloop>;
  using Base::Base;
  using typename Base::Fragments;
  using typename Base::Stage;
  using typename Base::Sums;
  static constexpr float kUnit = F::kUnit;
  static constexpr int kFragments = kPadding / kInstruction;  // of a K step
  static constexpr int kOfGroup = kFragments / kGroups;       // fragments that share scales
  static_assert(Base::kInSubtile % kOfGroup == 0);
  // Subtiles whose fragments are kept: all of a step, where registers are left.
  static constexpr int kBuffers = C::kConsumerWarpgroups <= 2 && kTokens <= 128 ? Base::kSubtiles : 2;

  static constexpr bool kMayBeLarge = requires { typename F::Large; };

  // Whether a scale of the warp's rows is above 1.
  static __device__ __forceinline__ bool has_large(Word const (&scales)[kGroups]) {
    if constexpr (kMayBeLarge) {
      Word any = 0;
#pragma unroll
      for (int group = 0; group < kGroups; ++group) any |= scales[group];
      return __any_sync(~0u, (any & F::Scales::kLarge) != 0);
    }
    return false;
  }

  template <class Of>
  static __device__ __forceinline__ void make(Fragments& a, Word const (&words)[4], Word const (&scales)[kGroups],
                                              int subtile) {
    typename Of::Factor factor;
#pragma unroll
    for (int i = 0; i < Base::kInSubtile; ++i) {
      int const fragment = subtile * Base::kInSubtile + i;
      if (fragment % kOfGroup == 0) factor = Of::factor(scales[fragment / kOfGroup]);
      Of::make(a[i], words + word_of(4, fragment * kInstruction), factor);
    }
  }
  static __device__ __forceinline__ void make(Fragments& a, Word const (&words)[4], Word const (&scales)[kGroups],
                                              bool is_large, int subtile) {
    if constexpr (kMayBeLarge) {
      if (is_large) return make<typename F::Large>(a, words, scales, subtile);
    }
    make<F>(a, words, scales, subtile);
  }

  // A K step. Fragments are made while the tensor cores multiply earlier ones.
  __device__ __forceinline__ void multiply_step(Sums& sums, Stage const& stage) const {
    Fragments a[kBuffers];
    Word words[4], scales[kGroups];
    this->load(words, stage, 0);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      scales[group] = load_byte_pair(stage.scales + this->parameter + group * kPanelRows);
    }
    bool const is_large = has_large(scales);
#pragma unroll
    for (int subtile = 0; subtile < Base::kSubtiles; ++subtile) {
      if (subtile >= kBuffers) cute::warpgroup_wait<kBuffers - 1>();  // of the fragments that are overwritten
      make(a[subtile % kBuffers], words, scales, is_large, subtile);
      if (subtile + 1 < Base::kSubtiles) this->load(words, stage, subtile + 1);
      this->begin(sums[0], a[subtile % kBuffers], stage, subtile, true);
    }
    cute::warpgroup_wait<0>();
    this->fence(sums[0]);
  }

  static __device__ __forceinline__ void store(TileParams const& params, DirectRows<T> const& rows, int first_token,
                                               float const* four) {
    float const* const factor = static_cast<FactorParams const&>(params).factor;
    rows.store(first_token, four, kUnit * (factor != nullptr ? __ldg(factor) : 1.f));
  }
};

}  // namespace epiloq::ops::weight_only_mm

namespace epiloq::ops::grouped_packed_mm {

namespace wo = weight_only_mm;

template <class T, Format kFormat>
struct FoldedOf;  // the fragment of weights that are multiplied by their scales
template <>
struct FoldedOf<__nv_bfloat16, Format::kMxfp4> {
  using Type = wo::Mxfp4FoldedFragment<false>;
};
template <class T>
struct FoldedOf<T, Format::kNvfp4> {
  using Type = wo::Nvfp4Fragment<T>;
};

template <int kRow, DType kX, Format kFormat>
void launch_wgmma(Problem const& p, int, int split, int device, Stream stream) {
  constexpr wo::WgmmaConfig kConfig = kWgmmaRows[kRow];
  static_assert(kConfig.blocks == 1 && kConfig.rounds);
  using T = CudaType<kX>;
  using C = wo::Fp4Wgmma<T, typename FoldedOf<T, kFormat>::Type, groups_of(kFormat), kConfig.m_groups, kConfig.k_groups,
                         kConfig.tokens>;
  wo::Problem const& of = p.product;
  auto const& maps = wo::cached_maps(wo::MatrixReads::of<C>(of), device);
  wo::FactorParams const params{wo::params_of<C>(kConfig, of, split, maps, device), p.factor};
  wo::launch_tiles<C>(&wo::wgmma_kernel<C>, kConfig, params, split, device, stream, "launching epiloq.packed_fp4_mm");
}

}  // namespace epiloq::ops::grouped_packed_mm
