#pragma once

#include "ops/conv2d/geometry.h"
#include "ops/weight_only_mm/kernels.h"

namespace epiloq::ops::conv2d_weight_only {

struct Problem {
  conv2d::Shape shape;
  bool depthwise;
  int channels, padded_channels;  // of a group; columns of a tap
  // Depthwise: n = Co, k = Kh Kw; q, scale, zero and offset as epiloq/conv2d_weight_only.h says, the rest not looked
  // at.
  weight_only_mm::Weight weight;
  void const* x;
  void* out;
  void const* bias;  // null: 0
  DType dtype;       // of x, out and bias
  float lo, hi;
};

}  // namespace epiloq::ops::conv2d_weight_only
