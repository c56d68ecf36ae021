#pragma once

// SIMD vectors exactly as wide as a register: compilers split wider ones lane by lane. Functions on them are always
// inlined, since the calling convention depends on the instruction set.

#include <cstdint>
#include <cstring>

namespace epiloq {

// 16 floats in one cache line: a load that crosses lines runs at half the rate.
struct alignas(64) Line {
  float values[16];
};

template <int kLanes>
struct Vectors {
  typedef std::uint8_t Bytes __attribute__((vector_size(kLanes)));
  typedef std::int16_t Shorts __attribute__((vector_size(2 * kLanes)));
  typedef std::uint16_t UnsignedShorts __attribute__((vector_size(2 * kLanes)));
  typedef std::int32_t Ints __attribute__((vector_size(4 * kLanes)));
  typedef std::uint32_t UnsignedInts __attribute__((vector_size(4 * kLanes)));
  typedef float Floats __attribute__((vector_size(4 * kLanes)));
};

template <class V, class T>
[[gnu::always_inline]] inline void load(V& out, T const* from) {
  std::memcpy(&out, from, sizeof(out));
}

// a[0] b[0] a[1] b[1] …, of the lower or the higher halves of 16.
template <class V>
[[gnu::always_inline]] inline void zip_low(V& out, V const& a, V const& b) {
  out = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
template <class V>
[[gnu::always_inline]] inline void zip_high(V& out, V const& a, V const& b) {
  out = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

// Lane i of each of 16 vectors of 16 lanes, to vector i.
template <class V>
[[gnu::always_inline]] inline void transpose(V* v) {
#pragma GCC unroll 4
  for (int stage = 0; stage < 4; ++stage) {
    V transposed[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
      zip_low(transposed[2 * i], v[i], v[i + 8]), zip_high(transposed[2 * i + 1], v[i], v[i + 8]);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) v[i] = transposed[i];
  }
}

// The sum of each of 16 vectors of 16 lanes, in v[0]; the rest is used up.
template <class V>
[[gnu::always_inline]] inline void sums_of_lanes(V* v) {
  for (int n = 8; n > 0; n /= 2) {
    for (int i = 0; i < n; ++i) {
      V low, high;
      zip_low(low, v[i], v[i + n]), zip_high(high, v[i], v[i + n]);
      v[i] = low + high;
    }
  }
}

}  // namespace epiloq
