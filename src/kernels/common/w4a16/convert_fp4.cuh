#pragma once

// Converts FP4 codes (E2M1: sign, two exponent bits, one of mantissa) to A fragments of mma.sync m16n8k16, exactly. A
// code's bits are moved to the sign, the low exponent bits and the high mantissa bit of a 16-bit float: the code's
// value times a power of two, subnormal where the code is.

#include "kernels/common/w4a16/convert.cuh"

namespace epiloq::ops::weight_only_mm {

template <class T>
__device__ __forceinline__ Word multiply_pairs(T, Word a, Word b) {
  return multiply_add_pairs<T>(a, b, 0);
}

// A code's value is its pattern in T times 2^14 or 2^126: the difference of T's exponent bias and E2M1's.
template <class T>
struct E2M1;
template <>
struct E2M1<__half> {
  static constexpr float kPatternUnit = 1 << 14;

  // The patterns of a word, whose nibbles p of both halves are register p of a fragment (see packed_layout.h). The
  // upper byte of a half holds one, so that four codes are moved at a time.
  static __device__ __forceinline__ void patterns(Word (&a)[4], Word w) {
    constexpr Word kSigns = 0x80808080, kSizes = 0x0e0e0e0e, kUpper = 0xff00ff00;
    constexpr unsigned kLowerToUpper = 0x2404;  // bytes 0 and 2 to bytes 1 and 3, others 0
    Word const even = masked_or(w << 4, kSigns, w << 1 & kSizes), odd = masked_or(w, kSigns, w >> 3 & kSizes);
    a[0] = __byte_perm(even, 0, kLowerToUpper);
    a[1] = __byte_perm(odd, 0, kLowerToUpper);
    a[2] = even & kUpper;
    a[3] = odd & kUpper;
  }
};
template <>
struct E2M1<__nv_bfloat16> {
  static constexpr Word kToValues = 0x7e807e80;  // 2^126, twice

  // One product moves a code to both places, of the sign and of the rest, without carries: the copies do not overlap.
  // Multiplications leave the integer pipe to logic.
  static __device__ __forceinline__ void patterns(Word (&a)[4], Word w) {
    constexpr Word kPattern = 0x81c081c0, kEven = 0x000f000f, kOdd = 0x00f000f0;
    constexpr Word kFromEven = (1 << 12) + (1 << 6), kFromOdd = kFromEven >> 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Word const two = half == 0 ? w : w >> 8;
      a[2 * half] = (two & kEven) * kFromEven & kPattern;
      a[2 * half + 1] = (two & kOdd) * kFromOdd & kPattern;
    }
  }
};

// MXFP4: a power of two for each 32 columns.
template <class T>
struct Mxfp4Fragment {
  static constexpr ScaleUse kScales = ScaleUse::kPowers;
  static constexpr bool kIsHalf = std::is_same_v<T, __half>;
  // Products of bfloat16's patterns themselves would be too small for fp32.
  static constexpr float kUnit = kIsHalf ? E2M1<__half>::kPatternUnit : 1.f;
  struct Zero {};
  static __device__ __forceinline__ Zero zero(Word, Word) { return {}; }

  static __device__ __forceinline__ void make(Word (&a)[4], Word const* w, Zero) {
    E2M1<T>::patterns(a, w[0]);
    if constexpr (!kIsHalf) {
#pragma unroll
      for (int p = 0; p < 4; ++p) a[p] = multiply_pairs(T{}, a[p], E2M1<T>::kToValues);
    }
  }
};

// NVFP4: a scale of type E4M3, not negative, for each 16 columns. The product of code and scale has at most six
// significant bits, and T represents it. A scale's byte has five exponent bits and three of mantissa: bits 7 to 14 of
// 128 times the scale as a half. Kernels multiply patterns by scales times 2^7 and 2^119, so that sums lack 2^7. A zero
// byte is no zero in bfloat16: then codes are zero (epiloq/weight_only_mm.h).
template <class T>
struct Nvfp4Fragment {
  static constexpr ScaleUse kScales = ScaleUse::kFolded;
  static constexpr bool kIsHalf = std::is_same_v<T, __half>;
  static constexpr float kUnit = 128;
  struct Zero {};
  static __device__ __forceinline__ Zero zero(Word, Word) { return {}; }

  struct Factor {
    Word low, high;  // of rows g and g + 8, in both halves
  };
  // Both rows' bytes.
  static __device__ __forceinline__ Factor factor(Word bytes) {
    Word const low = __byte_perm(bytes, 0, 0x4040), high = __byte_perm(bytes, 0, 0x4141);
    if constexpr (kIsHalf) return {low << 7, high << 7};
    constexpr Word kBias = 0x70007000;  // 224 to the exponents, twice
    return {low * 16 + kBias, high * 16 + kBias};
  }
  static __device__ __forceinline__ void make(Word (&a)[4], Word const* w, Factor const& factor) {
    E2M1<T>::patterns(a, w[0]);
#pragma unroll
    for (int p = 0; p < 4; ++p) a[p] = multiply_pairs(T{}, a[p], p % 2 == 0 ? factor.low : factor.high);
  }
};

// Factors of codes' patterns, from bytes of scales: one multiplication gives both halves of a register.
template <class T, int kGroups>
struct Fp4Scales;

// NVFP4: see Nvfp4Fragment.
template <class T>
struct Fp4Scales<T, 8> {
  using F = Nvfp4Fragment<T>;
  static constexpr bool kFolds = true, kMayFold = true;
  static __device__ __forceinline__ Word factor(Word byte) {
    if constexpr (F::kIsHalf) return byte * twice_of(1 << 7);
    return byte * twice_of(1 << 4) + twice_of(0x7000);  // 224 to the exponent
  }
  static constexpr Word twice_of(Word half) { return half * 0x10001u; }
};

// MXFP4. In bfloat16 a code times a scale of up to 1 is a number, 2^-128 or more, and the factor 2^(byte - 1) of its
// pattern too; bytes from 128 on, among them NaN, multiply sums. So they always do in a half.
template <class T>
struct Fp4Scales<T, 4> {
  using F = Mxfp4Fragment<T>;
  static constexpr bool kFolds = !F::kIsHalf, kMayFold = false;
  static constexpr Word kLarge = 0x80808080;
  static __device__ __forceinline__ Word factor(Word byte) {
    constexpr Word kTwice = 0x10001u, kBias = 126;
    return byte * (kTwice << 7) + (kBias << 7) * kTwice;
  }

  // The power 2^(byte - 127). As a float's exponent 0 would be no power, and 255 infinite, of which zero times itself
  // makes NaN.
  static __device__ __forceinline__ float power(Word byte) {
    constexpr Word kSmallest = 0x00400000;  // 2^-127, subnormal
    float const power = __uint_as_float(max(byte << 23, kSmallest));
    return fmaf(power, 0.f, power);
  }
};

}  // namespace epiloq::ops::weight_only_mm
