#pragma once

#include <vector>

#include "epiloq/tensor.h"

namespace epiloq::ops::quantize_blockwise_int8 {

// Floats per parameter in TF32 parts: high, low, high, low (kernels/common/ptx/tf32.cuh).
inline constexpr int kTf32Parts = 4;

// Parameters lie at [row * row_stride + block * block_stride]: the caller chooses the order. Past the last value, up to
// padded_cols, q is 0; for blocks of a power of two from 16 to 512 so are scales, offsets and sums.
struct Problem {
  int rows, cols, padded_cols, group;
  int parameter_rows;  // rows that parameters are stored for on CUDA: zeros for those past `rows`
  std::int64_t stride_x, stride_q, row_stride, block_stride;
  void const* x;
  std::int8_t* q;
  float* scale;
  float* offset;       // null: symmetric
  std::int32_t* sum;   // the sum of q, or null
  float* scaled_sum;   // scale times the sum of q, or null
  bool in_tf32_parts;  // all but `sum`; strides and pointers leave room for four floats each; CUDA only
};

void launch(Problem const& problem, DType x, int device, Stream stream);
void run_on_host(Problem const& problem, DType x);
// One row; `scratch` may be overwritten.
void quantize_row_on_host(Problem const& problem, DType x, int row, std::vector<float>& scratch);

}  // namespace epiloq::ops::quantize_blockwise_int8
