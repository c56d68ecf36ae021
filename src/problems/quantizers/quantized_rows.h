#pragma once

#include <cstdint>

#include "core/float8.h"

namespace epiloq {

inline constexpr int kFewestLanes = 4;  // threads that share a scale in a one-pass kernel, at least

// Rows that an operation computes in FP32 and writes as int8 or FP8 with measured scales.
struct QuantizedRows {
  int rows, cols, padded_cols;
  int tile_cols, tiles;  // columns that share a scale; scales a row
  int lanes;             // threads that share a scale in a one-pass kernel; 0: all of the row's
  std::int64_t stride_q, scale_row, scale_col;
  std::uint8_t* q;
  float* scale;
  ScaleRule rule;
};

// Which of an operation's kernels handles the rows: the elementwise one, or one that holds a row in registers.
struct RowPlan {
  int kernel;   // 0: elementwise; 1, 2, 3: 1, 2, 4 vectors of 8 per thread
  int threads;  // per row
  int lanes;
  int rows = 1;  // per CTA; several rows have a warp each
};

}  // namespace epiloq
