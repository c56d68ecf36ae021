#pragma once

#include "problems/weight_only.h"

namespace epiloq::ops::w4a8_mm {

struct Problem {
  weight_only_mm::Problem product;  // x: the permuted tokens [m, padded_k], uint8
  float const* scale_a;
  int stride_scale;  // 0 or 1
  std::uint8_t const* x_q;
  std::int64_t stride_x_q;
};

// Tokens times their scales, as bfloat16.
struct WidenProblem {
  std::uint8_t const* x_q;
  float const* scale_a;
  void* out;
  std::int64_t stride_x_q, stride_out;
  int rows, columns, stride_scale;
  bool aligned;  // rows of both start on 16 bytes
};
void launch_widen(WidenProblem const& problem, DType element, int device, Stream stream);

}  // namespace epiloq::ops::w4a8_mm
