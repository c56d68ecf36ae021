#pragma once

#include "gemm/groupwise_problem.h"
#include "ops/groupwise_mm/select.h"

namespace epiloq::ops::groupwise_mm {

// The architecture whose kernels serve a device here: sm90, sm80 (int8), sm89 (float8), or auto for the generic one.
Arch arch_of_device(int device, DType element);

void launch(Choice const& choice, gemm::GroupwiseProblem problem, DType element, DType out, int device, Stream stream);

}  // namespace epiloq::ops::groupwise_mm
