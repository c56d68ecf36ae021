#pragma once

// Epilogue of the CPU products: bias, clamp, and one rounding to D's type.

#include "epiloq/tensor.h"

namespace epiloq {

struct Columns {
  void const* bias;  // of D's type, or null
  void* out;
  DType dtype;
  std::int64_t stride;
  float lo, hi;  // NaN stays
};

// Applies it to `columns` columns (at most kMostColumns) from `column` on, of `count` rows from `row` on. Rows of sums
// are `stride` apart and are read up to a multiple of 16.
inline constexpr int kMostColumns = 32;
void write(Columns const& to, int row, int count, int column, int columns, float const* sums, int stride);

}  // namespace epiloq
