#pragma once

// float8 products on the CPU, accumulated in float32.

#include <span>

#include "cpu/common/panels.h"
#include "epiloq/tensor.h"

namespace epiloq {

inline constexpr int kFloat8Columns = 128;  // that share a scale

// A matrix by rows, with the scales of its blocks, if it has any.
struct ScaledFloat8 {
  std::uint8_t const* values;
  std::int64_t rows, columns, stride;
  bool is_e5m2 = false;
  float const* scale = nullptr;
  std::int64_t scale_stride_row = 0, scale_stride_column = 0;
  int scale_shift = 0, scale_shift_column = 0;  // 2^shift rows, or groups of kFloat8Columns columns, share a scale

  // Scale of the k_block-th group of kFloat8Columns columns.
  float scale_at(std::int64_t row, std::int64_t k_block) const {
    std::int64_t const column = k_block >> scale_shift_column;
    return scale == nullptr ? 1.f : scale[(row >> scale_shift) * scale_stride_row + column * scale_stride_column];
  }
};

// Rows of float32, float16 or bfloat16.
struct FloatRows {
  void const* values;
  DType dtype;
  std::int64_t rows, columns, stride;
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

// The same with floating-point rows x, which are not rounded.
void multiply_float8(FloatRows const& x, ScaledFloat8 const& w, int threads, FinishPanel<float> const& finish);
char const* float8_routine_of_floats(std::int64_t tokens, DType dtype);

}  // namespace epiloq
