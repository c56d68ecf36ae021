#pragma once

#include <string>

#include "epiloq/export.h"
#include "epiloq/gate.h"
#include "epiloq/granularity.h"
#include "epiloq/tensor.h"

namespace epiloq {

// q = the quantised silu(x[…, :K]) * x[…, K:], silu(g) = g / (1 + exp(-g)), or another gate, in fp32 from x to q, with
// scales as quantize_fp8 measures them. One pass over memory.
struct SiluAndMulQuant {
  TensorView q;      // […, Kp] int8 (tokens) or float8_e4m3fn, rows dense, Kp >= K; columns past K are set to 0
  TensorView x;      // […, 2 K] float32, float16 or bfloat16, rows dense
  TensorView scale;  // float32: one a row, or […, ceil(K / g)] in dense rows or dense columns
  Granularity granularity = Granularity::kToken;  // or kGroup
  int group_size = 128;
  bool ue8m0 = false;
  Gate gate{};
  int threads = 1;  // on the CPU, at most (threads.h)
};

EPILOQ_API void check(SiluAndMulQuant const& call);
EPILOQ_API std::string explain(SiluAndMulQuant const& call);  // the kernel's name; throws what the call would
EPILOQ_API void silu_and_mul_quant(SiluAndMulQuant const& call, Stream stream = nullptr);

}  // namespace epiloq
