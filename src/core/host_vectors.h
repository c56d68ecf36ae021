#pragma once

// Vectors of the CPU, 16 wide whatever the registers: compilers split them. Functions that take them are inlined, as
// their calls would differ between instruction sets.

#include <cstdint>
#include <cstring>

namespace epiloq {

inline constexpr int kWidth = 16;
using Bytes [[gnu::vector_size(kWidth)]] = std::uint8_t;
using Ints [[gnu::vector_size(4 * kWidth)]] = std::int32_t;
using Floats [[gnu::vector_size(4 * kWidth)]] = float;

template <class V, class T>
[[gnu::always_inline]] inline void load(V& out, T const* from) {
  std::memcpy(&out, from, sizeof(out));
}

[[gnu::always_inline]] inline void splat(Floats& out, float a) {
  out = Floats{a, a, a, a, a, a, a, a, a, a, a, a, a, a, a, a};
}

// a[0] b[0] a[1] b[1] .., of the lower or the higher halves.
template <class V>
[[gnu::always_inline]] inline void zip_low(V& out, V const& a, V const& b) {
  out = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
template <class V>
[[gnu::always_inline]] inline void zip_high(V& out, V const& a, V const& b) {
  out = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

}  // namespace epiloq
