#pragma once

#include "epiloq/tensor.h"

namespace epiloq::ops::quantize_int8 {

struct Problem {
  int rows, cols, padded_cols;
  std::int64_t stride_x, stride_q;
  void const* x;
  std::int8_t* q;
  float* scale;       // one, or one a row
  std::int32_t* azp;  // the same; null when symmetric
  bool per_row;       // static only: a scale a row
  bool is_static;
  bool range_includes_zero;
};

void launch(Problem const& problem, DType x, int device, Stream stream);
void run_on_host(Problem const& problem, DType x);

}  // namespace epiloq::ops::quantize_int8
