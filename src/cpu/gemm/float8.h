#pragma once

// float8 products on the CPU, accumulated in float32.

#include <span>

#include "cpu/common/panels.h"

namespace epiloq {

inline constexpr int kFloat8Columns = 128;  // that share a scale

// A matrix by rows, with the scales of its blocks, if it has any.
struct ScaledFloat8 {
  std::uint8_t const* values;
  std::int64_t rows, columns, stride;
  bool is_e5m2 = false;
  float const* scale = nullptr;
  std::int64_t scale_stride_row = 0, scale_stride_column = 0;
  int scale_shift = 0;  // 2^scale_shift rows share a scale

  // Scale of the k_block-th group of kFloat8Columns columns.
  float scale_at(std::int64_t row, std::int64_t k_block) const {
    return scale == nullptr ? 1.f : scale[(row >> scale_shift) * scale_stride_row + k_block * scale_stride_column];
  }
};

using Float8Sums = PanelSums<float>;

// x [m, k] times w [n, k] transposed: calls finish(sums) for each part of the product, from at most `threads` threads.
using MultiplyFloat8 = void (*)(ScaledFloat8 const& x, ScaledFloat8 const& w, int threads,
                                FinishPanel<float> const& finish);

// An implementation for `fewest` to `most` tokens; the first one that fits and that the CPU supports is used.
struct Float8Routine {
  char const* name;
  bool (*is_here)();
  std::int64_t fewest, most;
  MultiplyFloat8 multiply;
};
std::span<Float8Routine const> float8_routines();
Float8Routine const& float8_routine(std::int64_t tokens);
// Runs the chosen implementation on as many threads as the product is worth.
void multiply_float8(ScaledFloat8 const& x, ScaledFloat8 const& w, int threads, FinishPanel<float> const& finish);

}  // namespace epiloq
