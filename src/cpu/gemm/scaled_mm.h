#pragma once

#include "problems/gemm.h"

namespace epiloq::ops::scaled_mm {

// int8 and float8 products on the CPU, and batches of them; of int8 D is int8 too with an output scale.
void run_on_host(gemm::Problem const& problem, gemm::Types types, bool has_zero_point, int threads);

}  // namespace epiloq::ops::scaled_mm
