#pragma once

#include "core/half.h"

struct __nv_bfloat16 {
  std::uint16_t bits;
  __nv_bfloat16() = default;
  __nv_bfloat16(std::uint16_t bits_) : bits(bits_) {}
  explicit __nv_bfloat16(float value) : bits(epiloq::bfloat16_of_float(value)) {}
  explicit operator float() const { return epiloq::float_of_bfloat16(bits); }
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) {
  return {{epiloq::bfloat16_of_float(a)}, {epiloq::bfloat16_of_float(b)}};
}
