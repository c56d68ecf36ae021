#pragma once

// Converts float32 to D's type, 16 elements at a time, inside kernels compiled per instruction set. Explicit vectors:
// gcc's code for a loop of 16 roundings takes longer than the products before it.

#include <algorithm>

#include "cpu/isa/vectors.h"
#include "epiloq/tensor.h"

namespace epiloq {

// Vectorised versions of the conversions in half.h.
template <int kLanes>
struct Rounding {
  using Floats = typename Vectors<kLanes>::Floats;
  using Words = typename Vectors<kLanes>::UnsignedInts;
  using Halves = typename Vectors<kLanes>::UnsignedShorts;

  [[gnu::always_inline]] static void to_bfloat16(Floats const& x, std::uint16_t* out) {
    Words bits;
    std::memcpy(&bits, &x, sizeof(bits));
    Words upper = bits >> 16;
    Words rounded = (bits + 0x7fffu + (upper & 1u)) >> 16;
    store(x != x ? upper | 0x40u : rounded, out);
  }

  [[gnu::always_inline]] static void to_float16(Floats const& x, std::uint16_t* out) {
    Words bits;
    std::memcpy(&bits, &x, sizeof(bits));
    Words magnitude = bits & 0x7fffffffu;
    Words half = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13;
    Floats subnormal;
    std::memcpy(&subnormal, &magnitude, sizeof(subnormal));
    subnormal += 0.5f;
    Words places;
    std::memcpy(&places, &subnormal, sizeof(places));
    Words const infinity = Words{} + 0x7c00u;
    Words const nan = Words{} + 0x7e00u;
    half = magnitude < 0x38800000u ? places - 0x3f000000u : half;
    half = magnitude >= 0x477ff000u ? infinity : half;
    half = x != x ? nan : half;
    store((bits >> 16 & 0x8000u) | half, out);
  }

 private:
  [[gnu::always_inline]] static void store(Words const& words, std::uint16_t* out) {
    Halves halves = __builtin_convertvector(words, Halves);
    std::memcpy(out, &halves, sizeof(halves));
  }
};

inline constexpr int kOutputBlock = 16;

template <DType kType>
using OutputElement = std::conditional_t<kType == DType::kFloat32, float,
                                         std::conditional_t<kType == DType::kInt8, std::int8_t, std::uint16_t>>;

// Rows of D lie on different pages, and stores wait for memory: rows are prefetched this far ahead.
inline constexpr int kRowsAhead = 8;
template <class Element>
[[gnu::always_inline]] inline void expect_row(Element const* row, int columns) {
  __builtin_prefetch(row, 1), __builtin_prefetch(row + columns - 1, 1);
}

// Stores the first `count` of 16 values to `out`, float32 rounded, int8 unchanged.
template <DType kType, int kLanes, class Value>
[[gnu::always_inline]] inline void put(Value const (&values)[kOutputBlock], int count, OutputElement<kType>* out) {
  OutputElement<kType> some[kOutputBlock];
  bool const all = count >= kOutputBlock;
  auto* const to = all ? out : some;
  if constexpr (kType == DType::kFloat32 || kType == DType::kInt8) {
    std::memcpy(to, values, sizeof(some));
  } else {
    for (int i = 0; i < kOutputBlock; i += kLanes) {
      typename Rounding<kLanes>::Floats x;
      load(x, values + i);
      if constexpr (kType == DType::kFloat16) {
        Rounding<kLanes>::to_float16(x, to + i);
      } else {
        Rounding<kLanes>::to_bfloat16(x, to + i);
      }
    }
  }
  if (!all) std::copy_n(some, count, out);
}

}  // namespace epiloq
