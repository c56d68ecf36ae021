#pragma once

#include "gemm/blockwise.cuh"
#include "gemm/blockwise_sm80.cuh"
#include "ops/online_quant_mm/configs.h"
#include "ops/online_quant_mm/kernels.h"

namespace epiloq::ops::online_quant_mm {

template <int kRow, int kGroup, int kBits>
void launch_sm80(gemm::BlockwiseProblem const& problem, int device, Stream stream) {
  gemm::BlockwiseGemm<gemm::BlockwiseSm80, kTiles[kRow], kGroup, kBits>::launch(problem, device, stream);
}

}  // namespace epiloq::ops::online_quant_mm
