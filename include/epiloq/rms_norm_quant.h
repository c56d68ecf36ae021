#pragma once

#include <optional>
#include <string>

#include "epiloq/export.h"
#include "epiloq/granularity.h"
#include "epiloq/tensor.h"

namespace epiloq {

// r = x, or x + residual rounded to x's dtype, which is written to residual_out;
// q = the quantised r / sqrt(mean(r^2) + eps) * weight, in fp32 from r to q, with scales as quantize_fp8 measures them.
// One pass over memory.
struct RmsNormQuant {
  TensorView q;       // […, Kp] int8 (tokens) or float8_e4m3fn, rows dense, Kp >= K; columns past K are set to 0
  TensorView x;       // […, K] float32, float16 or bfloat16, rows dense
  TensorView weight;  // [K] of x's dtype
  TensorView scale;   // float32: one a row, or […, ceil(K / g)] in dense rows or dense columns
  std::optional<TensorView> residual{};      // x's shape and dtype
  std::optional<TensorView> residual_out{};  // with residual; may be the same memory
  float eps = 1e-6f;
  Granularity granularity = Granularity::kToken;  // or kGroup
  int group_size = 128;
  bool ue8m0 = false;
  int threads = 1;  // on the CPU, at most (threads.h)
};

EPILOQ_API void check(RmsNormQuant const& call);
EPILOQ_API std::string explain(RmsNormQuant const& call);  // the kernel's name; throws what the call would
EPILOQ_API void rms_norm_quant(RmsNormQuant const& call, Stream stream = nullptr);

}  // namespace epiloq
