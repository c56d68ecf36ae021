#pragma once

#include "problems/conv2d_geometry.h"
#include "problems/weight_only.h"

namespace epiloq::ops::conv2d_weight_only {

inline constexpr int kElementBytes = 2;  // of x

struct Problem {
  conv2d::Shape shape;
  bool depthwise;
  int channels, padded_channels;  // per group; columns per tap
  // Depthwise: n = Co, k = Kh Kw; q, scale, zero and offset as in epiloq/conv2d_weight_only.h, the rest unused.
  weight_only_mm::Weight weight;
  void const* x;
  void* out;
  void const* bias;  // null: 0
  DType dtype;       // of x, out and bias
  float lo, hi;
};

}  // namespace epiloq::ops::conv2d_weight_only
