#pragma once

#include "core/checks.h"
#include "core/float8.h"
#include "epiloq/granularity.h"

namespace epiloq {

inline constexpr int kFewestLanes = 4;  // that share a scale in a one-pass kernel

// Rows that an operation computes in fp32 and writes as int8 or FP8 with the scales that it measured.
struct QuantizedRows {
  int rows, cols, padded_cols;
  int tile_cols, tiles;  // columns that share a scale; scales a row
  int lanes;             // threads that share a scale in a one-pass kernel; 0: all of the row's
  std::int64_t stride_q, scale_row, scale_col;
  std::uint8_t* q;
  float* scale;
  ScaleRule rule;
};

// Checks the outputs `q` ("out") and `scale` of `cols` columns for each row of x.
QuantizedRows check_quantized(Checker const& check, TensorView const& q, TensorView const& scale, TensorView const& x,
                              std::int64_t cols, Granularity granularity, int group_size, bool ue8m0);

// Which of an operation's kernels takes the rows: the one for elements, or one that holds them in registers.
struct RowPlan {
  int kernel;   // 0: an element at a time; 1, 2, 3: 1, 2, 4 vectors of 8 a thread
  int threads;  // of a row
  int lanes;
  int rows = 1;  // of a block; several have a warp each
};

// `inputs_in_vectors`: what is read lies in whole vectors on 16 bytes. `kernels`: the last one that there is.
RowPlan plan_rows(QuantizedRows const& rows, bool inputs_in_vectors, int sm_count, int kernels = 3);
char const* describe(RowPlan const& plan);

// Whether rows of `cols` elements can be read 16 bytes at a time.
bool in_vectors(void const* data, DType dtype, std::int64_t stride, std::int64_t cols);

}  // namespace epiloq
