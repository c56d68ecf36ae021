#pragma once

#include <string>

#include "epiloq/export.h"
#include "epiloq/gate.h"
#include "epiloq/tensor.h"

namespace epiloq {

// out = silu(x[…, :K]) * x[…, K:], silu(g) = g / (1 + exp(-g)), or another gate, in fp32 and rounded once.
struct SiluAndMul {
  TensorView out;  // […, K] of x's dtype, rows dense
  TensorView x;    // […, 2 K] float32, float16 or bfloat16, rows dense
  Gate gate{};
  bool interleaved = false;  // gates in even and factors in odd columns, instead of halves
  int threads = 1;           // on the CPU, at most (threads.h)
};

EPILOQ_API void check(SiluAndMul const& call);
EPILOQ_API std::string explain(SiluAndMul const& call);  // the kernel's name; throws what the call would
EPILOQ_API void silu_and_mul(SiluAndMul const& call, Stream stream = nullptr);

}  // namespace epiloq
