#pragma once

#include <optional>
#include <string>

#include "epiloq/export.h"
#include "epiloq/tensor.h"

namespace epiloq {

// W[row, column] = q[row, column] * scale[row / block_rows, column / block_columns].
struct Fp8Weight {
  TensorView q;  // float8_e4m3fn [n, k], rows dense
  TensorView
      scale;  // float32 [ceil(n / block_rows), ceil(k / block_columns)], contiguous; or its first dimension alone
  std::int64_t block_rows = 1, block_columns = -1;  // -1: all
};

// out = x W^T + bias: q is multiplied by x without rounding, sums are fp32, a block's scale multiplies its sum, and one
// rounding follows.
struct Fp8WeightMm {
  TensorView out;  // […, n] of x's dtype, rows dense
  TensorView x;    // […, k] float16, bfloat16 or float32, rows dense
  Fp8Weight weight;
  std::optional<TensorView> bias{};  // [n] of x's dtype, added in fp32
  int threads = 1;                   // on the CPU, at most (threads.h)
};

// out = rows of W: products in fp32, rounded once.
struct DequantizeFp8 {
  TensorView out;  // [rows, k] float16, bfloat16 or float32, contiguous
  Fp8Weight weight;
  std::int64_t first_row = 0;
  int threads = 1;  // of the CPU
};

EPILOQ_API void check(Fp8WeightMm const& call);
EPILOQ_API void check(DequantizeFp8 const& call);

// On CUDA launches and returns true; or does nothing and returns false if the weight should be dequantised for a dense
// product: more than 64 rows of x, float32, blocks of columns that are not a multiple of 64, rows of x or of the weight
// that are not 16-byte aligned. On the CPU computes and returns true; or false for blocks of columns that are not 128
// times a power of two, or of rows that are not a power of two.
EPILOQ_API bool fp8_weight_mm(Fp8WeightMm const& call, Stream stream);
// On any device.
EPILOQ_API void dequantize_fp8(DequantizeFp8 const& call, Stream stream);
EPILOQ_API std::string explain(Fp8WeightMm const& call);

}  // namespace epiloq
