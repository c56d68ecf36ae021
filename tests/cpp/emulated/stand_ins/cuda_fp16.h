#pragma once

#include <vector_types.h>

#include "core/half.h"

struct __half {
  std::uint16_t bits;
  explicit operator float() const { return epiloq::float_of_float16(bits); }
};
struct __half2 {
  __half x, y;
};
inline float2 __half22float2(__half2 pair) { return {static_cast<float>(pair.x), static_cast<float>(pair.y)}; }
inline __half2 __floats2half2_rn(float a, float b) {
  return {{epiloq::float16_of_float(a)}, {epiloq::float16_of_float(b)}};
}
