#pragma once

#include "dispatch/groupwise_mm/select.h"
#include "epilogue/library.h"
#include "problems/groupwise_gemm.h"

namespace epiloq::ops::groupwise_mm {

// `operands` select the epilogue of the kernels with scales per row; the problem has the ones that these read.
void launch(Choice const& choice, gemm::GroupwiseProblem problem, DType element, DType out, int device, Stream stream,
            epilogue::Operands const& operands = {});

}  // namespace epiloq::ops::groupwise_mm
