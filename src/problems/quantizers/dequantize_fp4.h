#pragma once

#include "epiloq/dequantize_fp4.h"
#include "problems/weight_only.h"

namespace epiloq::ops::dequantize_fp4 {

struct Problem {
  weight_only_mm::Weight weight;
  WeightFormat format;
  void* out;
  float const* global_scale;  // null: 1
  int rows_per_factor;        // of the weight, that share an element of global_scale
  float* row_scale;           // for float8
};

void launch(Problem const& problem, DType out, int device, Stream stream);

}  // namespace epiloq::ops::dequantize_fp4
