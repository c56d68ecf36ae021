#pragma once

// Converts values of 2 and 3 bits to A fragments, as convert.cuh does 4 and 8 bits, from the patterns of
// problems/narrow_codes.h. Per block of 32 columns, 16 values of a lane, with 2 bits: 1 shift, 8 ANDs and 8
// multiply-adds; with 3 bits: 3 shifts, 9 LOP3s and 8 multiply-adds. 4 bits take 2 shifts, 8 and 8.

#include "kernels/common/w4a16/convert.cuh"
#include "problems/narrow_codes.h"

namespace epiloq::ops::weight_only_mm {

// The multiply-add that turns patterns into units of T that are normal numbers, and subtracts the zero point, exactly.
template <class T>
struct NarrowUnits;

template <>
struct NarrowUnits<__nv_bfloat16> : SubnormalFragment {
  // 2^(127 - position), twice: a pattern is a multiple of 2^-133.
  static constexpr Word power(int position) { return (0x7f00u - 0x80u * position) * 0x10001u; }
};

// A pattern is a multiple of 2^-24: 2^15 turns it into 512ths.
template <>
struct NarrowUnits<__half> : ScaledByGroup {
  static constexpr float kUnit = 512;
  static constexpr Word kOnes = 0x18001800;
  struct Zero {
    Word low, high;  // in 512ths, negative
  };
  static constexpr Word power(int position) { return (0x7800u - 0x400u * position) * 0x10001u; }
  static __device__ __forceinline__ Word multiply_add(Word a, Word b, Word c) {
    return multiply_add_pairs<__half>(a, b, c);
  }
  static __device__ __forceinline__ Zero zero(Word low_row, Word high_row) {
    constexpr Word kMinus = 0x80008000;
    return {multiply_add(twice(low_row), power(0) | kMinus, 0), multiply_add(twice(high_row), power(0) | kMinus, 0)};
  }
};

template <class T, int kBits>
struct NarrowFragment : NarrowUnits<T> {
  using Units = NarrowUnits<T>;
  // Fragment 0 or 1 of a block.
  static __device__ __forceinline__ void make(Word (&a)[4], Word const* block, int fragment,
                                              typename Units::Zero const& zero) {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      int const pair = 4 * fragment + p;
      Word const power = Units::power(narrow::field_of(kBits, pair).position);
      a[p] = Units::multiply_add(narrow::pattern(kBits, block, pair), power, p % 2 == 0 ? zero.low : zero.high);
    }
  }
};

template <class T>
struct Fragment<T, 2> : NarrowFragment<T, 2> {};
template <class T>
struct Fragment<T, 3> : NarrowFragment<T, 3> {};

}  // namespace epiloq::ops::weight_only_mm
