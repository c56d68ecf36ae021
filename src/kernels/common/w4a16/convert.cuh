#pragma once

// Converts packed integers to A fragments of mma.sync m16n8k16: q - zero as 16-bit floats, exactly, without conversion
// instructions. An integer ORed into the low mantissa bits of a power of two is that power plus the integer; or the bit
// pattern is already a subnormal number.

#include "kernels/common/w4a16/instructions.cuh"

namespace epiloq::ops::weight_only_mm {

// How a fragment's scales enter: in fp32, by which a group's sums are multiplied, stored as floats or as powers of two
// (E8M0); or folded into the weights before the tensor cores, where that is exact.
enum class ScaleUse { kFloats, kPowers, kFolded };

// kBits / 4 words of a lane become the four registers of a fragment: rows g, g + 8, g, g + 8. `Zero` holds what the two
// rows subtract, in the form the subtraction needs. Values are scaled by kUnit, by which sums are multiplied at the
// end.
template <class T, int kBits>
struct Fragment;

struct ScaledByGroup {
  static constexpr ScaleUse kScales = ScaleUse::kFloats;
};

__device__ __forceinline__ Word twice(Word half) { return half * 0x10001u; }

template <>
struct Fragment<__half, 4> : ScaledByGroup {
  static constexpr float kUnit = 1;
  static constexpr Word kOnes = 0x3c003c00;
  struct Zero {
    Word low, high;  // 1024 + zero; -(64 + zero)
  };
  static __device__ __forceinline__ Zero zero(Word low_row, Word high_row) {
    return {twice(0x6400 | low_row), twice(0xd400 | high_row << 4)};
  }
  // The upper nibble of a byte counts 16-fold: (1024 + 16 q) / 16 = 64 + q.
  static __device__ __forceinline__ Word sixteenth(Word a, Word minus) {
    return multiply_add_pairs<__half>(a, 0x2c002c00u, minus);
  }
  static __device__ __forceinline__ void make(Word (&a)[4], Word const* w, Zero zero) {
    Word const first = w[0], second = first >> 8;
    a[0] = subtract(masked_or(first, 0x000f000f, 0x64006400), zero.low);
    a[1] = sixteenth(masked_or(first, 0x00f000f0, 0x64006400), zero.high);
    a[2] = subtract(masked_or(second, 0x000f000f, 0x64006400), zero.low);
    a[3] = sixteenth(masked_or(second, 0x00f000f0, 0x64006400), zero.high);
  }
};

template <>
struct Fragment<__half, 8> : ScaledByGroup {
  static constexpr float kUnit = 1;
  static constexpr Word kOnes = 0x3c003c00;
  struct Zero {
    Word low, high;  // 1024 + zero
  };
  static __device__ __forceinline__ Zero zero(Word low_row, Word high_row) {
    return {twice(0x6400 | low_row), twice(0x6400 | high_row)};
  }
  static __device__ __forceinline__ void make(Word (&a)[4], Word const* w, Zero zero) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      a[2 * half] = subtract(__byte_perm(w[half], 0x64646464u, 0x4140), zero.low);
      a[2 * half + 1] = subtract(__byte_perm(w[half], 0x64646464u, 0x4342), zero.high);
    }
  }
};

// A 16-bit pattern of up to 255 is a bfloat16 as it stands, a multiple of 2^-133, subnormal or in the first binade,
// whose spacing is the same. A multiply-add turns it into 64ths, which are normal, and subtracts the zero point,
// exactly. The upper nibble of a byte counts 16-fold.
struct SubnormalFragment : ScaledByGroup {
  static constexpr float kUnit = 64;
  static constexpr Word kOnes = 0x3c803c80;                                // as 64ths
  static constexpr Word kTo64ths = 0x7f007f00, kFrom16Times = 0x7d007d00;  // 2^127, 2^123
  struct Zero {
    Word low, high;  // in 64ths, negative
  };
  static __device__ __forceinline__ Word multiply_add(Word a, Word b, Word c) {
    return multiply_add_pairs<__nv_bfloat16>(a, b, c);
  }
  // Via 2^23 + zero in FP32, so that the compiler can fold constants.
  static __device__ __forceinline__ Word minus_64ths(Word zero) {
    Word const exact = __float_as_uint(fmaf(__uint_as_float(0x4b000000u | zero), -1.f / 64, 0x1p17f));
    return exact | exact >> 16;
  }
  static __device__ __forceinline__ Zero zero(Word low_row, Word high_row) {
    return {minus_64ths(low_row), minus_64ths(high_row)};
  }
};

template <>
struct Fragment<__nv_bfloat16, 4> : SubnormalFragment {
  static __device__ __forceinline__ void make(Word (&a)[4], Word const* w, Zero zero) {
    Word const first = w[0], second = first >> 8;
    a[0] = multiply_add(first & 0x000f000f, kTo64ths, zero.low);
    a[1] = multiply_add(first & 0x00f000f0, kFrom16Times, zero.high);
    a[2] = multiply_add(second & 0x000f000f, kTo64ths, zero.low);
    a[3] = multiply_add(second & 0x00f000f0, kFrom16Times, zero.high);
  }
};

template <>
struct Fragment<__nv_bfloat16, 8> : SubnormalFragment {
  static __device__ __forceinline__ void make(Word (&a)[4], Word const* w, Zero zero) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      a[2 * half] = multiply_add(__byte_perm(w[half], 0, 0x4140), kTo64ths, zero.low);
      a[2 * half + 1] = multiply_add(__byte_perm(w[half], 0, 0x4342), kTo64ths, zero.high);
    }
  }
};

}  // namespace epiloq::ops::weight_only_mm
