#pragma once

#include <optional>
#include <string>

#include "epiloq/export.h"
#include "epiloq/tensor.h"

namespace epiloq {

// A weight W [n, k] of 4-bit codes as in the NF4 and FP4 of bitsandbytes: with i = row * k + column,
// W[row, column] = table[code i] * scale[i / block_size].
struct TableWeight {
  TensorView codes;  // uint8 [ceil(n k / 2)], contiguous: code 2 i in the high half of byte i, code 2 i + 1 in the low
  TensorView table;  // float32 [16]
  TensorView scale;  // float32 [ceil(n k / block_size)], contiguous
  std::int64_t n = 0, k = 0, block_size = 64;
};

// out = x W^T + bias, accumulated in fp32: a block's scale multiplies its sum, and on CUDA the table is rounded to x's
// dtype.
struct TableMm {
  TensorView out;  // […, n] of x's dtype, rows dense
  TensorView x;    // […, k] float16, bfloat16 or float32, rows dense
  TableWeight weight;
  std::optional<TensorView> bias{};  // [n] of x's dtype, added in fp32
  int threads = 1;                   // on the CPU, at most (threads.h)
};

// out = W: products in fp32, rounded once.
struct DequantizeTable {
  TensorView out;  // [n, k] float16, bfloat16 or float32, contiguous
  TableWeight weight;
  int threads = 1;  // of the CPU
};

EPILOQ_API void check(TableMm const& call);
EPILOQ_API void check(DequantizeTable const& call);

// Launches, or on the CPU computes, and returns true; or does nothing and returns false if the weight should be
// dequantised for a dense product: more than 64 rows of x, float32, blocks that are no multiple of 64 columns or end
// inside a row, rows of x that are not 16-byte aligned; on the CPU more than 8 rows of x, blocks that are no multiple
// of 8 columns or end inside a row.
EPILOQ_API bool table_mm(TableMm const& call, Stream stream);
// On the CPU throws Unsupported for blocks that are no multiple of 8 columns or end inside a row.
EPILOQ_API void dequantize_table(DequantizeTable const& call, Stream stream);
EPILOQ_API std::string explain(TableMm const& call);

}  // namespace epiloq
