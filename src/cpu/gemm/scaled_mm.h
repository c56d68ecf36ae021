#pragma once

#include "problems/gemm.h"

namespace epiloq::ops::scaled_mm {

// int8 and float8 products on the CPU, and batches of them; with an output scale the D of int8 products is int8.
void run_on_host(gemm::Problem const& problem, gemm::Types types, int threads);

}  // namespace epiloq::ops::scaled_mm
