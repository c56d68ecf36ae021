#pragma once

#include <optional>
#include <string>

#include "epiloq/export.h"
#include "epiloq/tensor.h"

namespace epiloq {

// A weight W [n, k] of 4-bit codes as in the NF4 and FP4 of bitsandbytes: with i = row * k + column,
// W[row, column] = table[code i] * scale[i / block_size]. On a CUDA device.
struct TableWeight {
  TensorView codes;  // uint8 [ceil(n k / 2)], contiguous: code 2 i in the high half of byte i, code 2 i + 1 in the low
  TensorView table;  // float32 [16]
  TensorView scale;  // float32 [ceil(n k / block_size)], contiguous
  std::int64_t n = 0, k = 0, block_size = 64;
};

// out = x W^T + bias, accumulated in fp32: the table is rounded to x's dtype, and a block's scale multiplies its sum.
struct TableMm {
  TensorView out;  // […, n] of x's dtype, rows dense
  TensorView x;    // […, k] float16, bfloat16 or float32, rows dense
  TableWeight weight;
  std::optional<TensorView> bias{};  // [n] of x's dtype, added in fp32
};

// out = W: products in fp32, rounded once.
struct DequantizeTable {
  TensorView out;  // [n, k] float16, bfloat16 or float32, contiguous
  TableWeight weight;
};

EPILOQ_API void check(TableMm const& call);
EPILOQ_API void check(DequantizeTable const& call);

// Launches and returns true; or does nothing and returns false if the weight should be dequantised for a dense product:
// more than 64 rows of x, float32, blocks that are no multiple of 64 columns
// or end inside a row, rows of x that are not 16-byte aligned.
EPILOQ_API bool table_mm(TableMm const& call, Stream stream);
EPILOQ_API void dequantize_table(DequantizeTable const& call, Stream stream);
EPILOQ_API std::string explain(TableMm const& call);

}  // namespace epiloq
