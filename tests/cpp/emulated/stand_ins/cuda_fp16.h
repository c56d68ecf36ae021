#pragma once

#include <vector_types.h>

#include "core/half.h"

struct __half {
  std::uint16_t bits;
  __half() = default;
  __half(std::uint16_t bits_) : bits(bits_) {}
  explicit __half(float value) : bits(epiloq::float16_of_float(value)) {}
  explicit operator float() const { return epiloq::float_of_float16(bits); }
};
struct __half2_raw {
  std::uint16_t x, y;
};
struct __half2 {
  __half x, y;
  __half2(__half x_, __half y_) : x(x_), y(y_) {}
  explicit __half2(__half2_raw raw) : x(raw.x), y(raw.y) {}
};
inline __half __ushort_as_half(std::uint16_t bits) { return {bits}; }
inline __half2 __half2half2(__half both) { return {both, both}; }
inline __half2 __hsub2(__half2 a, __half2 b) {
  auto const difference = [](__half x, __half y) { return __half(static_cast<float>(x) - static_cast<float>(y)); };
  return {difference(a.x, b.x), difference(a.y, b.y)};
}
inline float2 __half22float2(__half2 pair) { return {static_cast<float>(pair.x), static_cast<float>(pair.y)}; }
inline __half2 __floats2half2_rn(float a, float b) {
  return {{epiloq::float16_of_float(a)}, {epiloq::float16_of_float(b)}};
}
