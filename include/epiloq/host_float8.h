#pragma once

#include <optional>

#include "epiloq/export.h"
#include "epiloq/tensor.h"

namespace epiloq {

// A matrix of float8 on the CPU, each block of `scale_rows` x `scale_columns` times its scale, if there are scales.
struct HostFloat8 {
  TensorView values;                  // [R, C] float8_e4m3fn or float8_e5m2, rows dense
  std::optional<TensorView> scale{};  // [ceil(R / scale_rows), ceil(C / scale_columns)] float32, any strides
  std::int64_t scale_rows = 1, scale_columns = 128;
};

// On the CPU alone, on at most `threads` threads (epiloq/threads.h); out shares no memory with what is read.

// out [R, C] float32, rows dense: the exact values, or these times their scales, rounded once.
EPILOQ_API void widen_float8(TensorView const& out, HostFloat8 const& matrix, int threads);

// out [M, R] = x [M, C] times the matrix transposed, all float32 with rows dense but for the matrix, which is widened
// in registers: for few rows of x, where reading it is what takes the time.
EPILOQ_API void multiply_float8(TensorView const& out, TensorView const& x, HostFloat8 const& matrix, int threads);

// out [M, R] float32 = x [M, C] times the matrix transposed, both of float8 and with the scales of their blocks, whose
// columns are multiples of 128: for many rows of x. A block's products are added up in float32, and then multiplied by
// its scales. On CPUs that multiply bfloat16 (AVX-512 BF16), which holds float8 exactly; elsewhere Unsupported.
EPILOQ_API bool multiplies_float8();
EPILOQ_API void multiply_float8(TensorView const& out, HostFloat8 const& x, HostFloat8 const& matrix, int threads);

}  // namespace epiloq
