#pragma once

#include <optional>
#include <string>

#include "epiloq/export.h"
#include "epiloq/tensor.h"

namespace epiloq {

// D_i = scale_a scale_b (A_i B_i) for each i of a batch, as scaled_mm has it; with scale_out, D_i is int8: that divided
// by scale_out, rounded to nearest, ties to even, and saturated. Batches and rows may have any strides, the
// batches of a and b also 0.
struct ScaledBmm {
  TensorView out;      // [B, M, N] float16, bfloat16 (on the CPU float32 too), or int8 with scale_out; rows dense
  TensorView a;        // [B, M, K] int8, or float8 (E4M3, E5M2), rows dense
  TensorView b;        // [B, K, N] of a's kind, columns dense
  TensorView scale_a;  // float32: one value, [B, 1, 1] or [B, M, 1]
  TensorView scale_b;  // float32: one value, [B, 1, 1] or [B, 1, N]
  std::optional<TensorView> scale_out{};  // float32, one value; int8 operands only
  int threads = 1;                        // on the CPU, at most (threads.h)
};

EPILOQ_API void check(ScaledBmm const& call);
EPILOQ_API void scaled_bmm(ScaledBmm const& call, Stream stream);
EPILOQ_API void scaled_bmm(ScaledBmm const& call);  // on the CPU
EPILOQ_API std::string explain(ScaledBmm const& call);

}  // namespace epiloq
