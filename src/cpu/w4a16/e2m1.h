#pragma once

// FP4 numbers (E2M1: sign, two bits of exponent, one of mantissa) by their codes.

#include "cpu/common/rows.h"
#include "cpu/isa/vectors.h"

namespace epiloq::ops::weight_only_mm {

inline constexpr float kE2m1[16] = {0.f,  0.5f,  1.f,  1.5f,  2.f,  3.f,  4.f,  6.f,
                                    -0.f, -0.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f};

// The number of each word's lower four bits.
template <int kLanes>
[[gnu::always_inline]] inline void widen_e2m1(typename Vectors<kLanes>::Floats& out,
                                              typename Vectors<kLanes>::Ints const& words) {
  using Floats = typename Vectors<kLanes>::Floats;
  using Ints = typename Vectors<kLanes>::Ints;
#ifdef EPILOQ_HAS_CLONES
  if constexpr (kLanes >= 8) {
    Floats table;
    load(table, kE2m1);
    out = __builtin_shuffle(table, words);  // of as many entries as there are lanes
    if constexpr (kLanes == 8) out = (Floats)((Ints)out ^ (words << 28 & INT32_MIN));
    return;
  }
#endif
  // Magnitudes are 0 to 4 halves, then 6, 8 and 12.
  Ints const code = words & 7;
  Ints const halves = code < 4 ? code : code < 6 ? 2 * code - 4 : 4 * code - 16;
  out = (Floats)((Ints)(0.5f * __builtin_convertvector(halves, Floats)) ^ (words << 28 & INT32_MIN));
}

}  // namespace epiloq::ops::weight_only_mm
