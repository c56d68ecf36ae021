#pragma once

#include <optional>
#include <string>

#include "epiloq/export.h"
#include "epiloq/tensor.h"

namespace epiloq {

// r = x, or x + residual rounded to x's dtype, which is written to residual_out;
// out = r / sqrt(mean(r^2) + eps) * weight, in fp32 from r on and rounded once. One pass over memory.
struct RmsNorm {
  TensorView out;                            // x's shape and dtype, rows dense
  TensorView x;                              // […, K] float32, float16 or bfloat16, rows dense
  TensorView weight;                         // [K] of x's dtype or float32
  std::optional<TensorView> residual{};      // x's shape and dtype
  std::optional<TensorView> residual_out{};  // with residual; may be the same memory
  float eps = 1e-6f;
  int threads = 1;  // on the CPU, at most (threads.h)
};

EPILOQ_API void check(RmsNorm const& call);
EPILOQ_API std::string explain(RmsNorm const& call);  // the kernel's name; throws what the call would
EPILOQ_API void rms_norm(RmsNorm const& call, Stream stream = nullptr);

}  // namespace epiloq
