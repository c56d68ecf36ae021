#pragma once

#include "core/checks.h"
#include "core/float8.h"
#include "epiloq/granularity.h"

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

// Checks that `out` has a row of `cols` columns, or more if it may be padded, for each row of x, and that a kernel's
// integers hold their numbers.
Matrix check_rows(Checker const& check, TensorView const& out, TensorView const& x, std::int64_t cols,
                  bool may_be_padded = false);

// Checks the outputs `q` ("out") and `scale` of `cols` columns for each row of x.
QuantizedRows check_quantized(Checker const& check, TensorView const& q, TensorView const& scale, TensorView const& x,
                              std::int64_t cols, Granularity granularity, int group_size, bool ue8m0);

// Which of an operation's kernels handles the rows: the elementwise one, or one that holds a row in registers.
struct RowPlan {
  int kernel;   // 0: elementwise; 1, 2, 3: 1, 2, 4 vectors of 8 per thread
  int threads;  // per row
  int lanes;
  int rows = 1;  // per CTA; several rows have a warp each
};

// `inputs_in_vectors`: inputs are whole vectors on 16 bytes. `kernels`: the number of one-pass kernels available.
RowPlan plan_rows(QuantizedRows const& rows, bool inputs_in_vectors, int sm_count, int kernels = 3);
char const* describe(RowPlan const& plan);

// Whether rows of `cols` elements can be read 16 bytes at a time.
bool in_vectors(void const* data, DType dtype, std::int64_t stride, std::int64_t cols);

}  // namespace epiloq
