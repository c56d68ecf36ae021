#pragma once

#include "epilogue/library.h"
#include "gemm/problem.h"

namespace epiloq::ops::scaled_mm {

// int8 products on the CPU: problem.a [m, k] and b [n, k] by rows; `out` float16, bfloat16 or float32, as the bias is.
void run_on_host(gemm::Problem const& problem, DType out, bool has_zero_point, int threads);

}  // namespace epiloq::ops::scaled_mm
