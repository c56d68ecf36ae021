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

// `columns` columns, kMostColumns at most, from `column` on of `count` rows from `row` on, of sums that are `stride`
// apart. Up to a multiple of 16 are read of each row.
inline constexpr int kMostColumns = 32;
void write(Columns const& to, int row, int count, int column, int columns, float const* sums, int stride);

}  // namespace epiloq
