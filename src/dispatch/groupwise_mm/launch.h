#pragma once

#include "dispatch/groupwise_mm/select.h"
#include "problems/groupwise_gemm.h"

namespace epiloq::ops::groupwise_mm {

void launch(Choice const& choice, gemm::GroupwiseProblem problem, DType element, DType out, int device, Stream stream);

}  // namespace epiloq::ops::groupwise_mm
