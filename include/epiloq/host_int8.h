#pragma once

#include "epiloq/export.h"
#include "epiloq/tensor.h"

namespace epiloq {

// out [M, N] int32 = A B^T on the CPU, A [M, K] and B [N, K] int8, rows dense: exact up to K = 131,071 (beyond, modulo
// 2^32). `threads`: at most, see threads.h.
EPILOQ_API void multiply_int8(TensorView const& out, TensorView const& a, TensorView const& b, int threads);

}  // namespace epiloq
