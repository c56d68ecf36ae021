#pragma once

#include "gemm/blockwise_sm90.cuh"
#include "ops/online_quant_mm/configs.h"
#include "ops/online_quant_mm/kernels.h"

namespace epiloq::ops::online_quant_mm {

template <int kRow, int kBits>
void launch_sm90(gemm::BlockwiseProblem const& problem, int device, Stream stream) {
  gemm::BlockwiseSm90Gemm<kSm90Tokens[kRow], kBits>::launch(problem, device, stream);
}

}  // namespace epiloq::ops::online_quant_mm
