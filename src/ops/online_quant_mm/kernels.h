#pragma once

#include "gemm/blockwise_problem.h"

namespace epiloq::ops::online_quant_mm {

template <int kRow, int kGroup, int kBits>
void launch_blockwise(gemm::BlockwiseProblem const& problem, int device, Stream stream);

}  // namespace epiloq::ops::online_quant_mm
