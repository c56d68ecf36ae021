#pragma once

#include "problems/gemm.h"
#include "problems/groupwise_gemm.h"

namespace epiloq::ops::groupwise_mm {

// groupwise_mm on the CPU, one expert after the other. The experts' rows must ascend and lie within the problem's.
// Scales are per row or per group.
void run_on_host(gemm::GroupwiseProblem const& problem, gemm::Types types, bool per_row_scales, int threads);

}  // namespace epiloq::ops::groupwise_mm
