#pragma once

// What products of the CPU end with: a bias, limits, and one rounding to D's type.

#include "core/host_vectors.h"
#include "epiloq/tensor.h"

namespace epiloq {

struct Columns {
  void const* bias;  // of D's type, or null
  void* out;
  DType dtype;
  std::int64_t stride;
  float lo, hi;  // NaN stays
};

// Up to 16 columns from `column` on of `count` rows from `row` on; sums are used up.
void write(Columns const& to, int row, int count, int column, int columns, Line* sums);

}  // namespace epiloq
