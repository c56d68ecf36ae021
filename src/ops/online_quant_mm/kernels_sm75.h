#pragma once

#include "gemm/blockwise.cuh"
#include "gemm/blockwise_sm75.cuh"
#include "ops/online_quant_mm/configs.h"
#include "ops/online_quant_mm/kernels.h"

namespace epiloq::ops::online_quant_mm {

template <int kRow, int kGroup, int kBits>
void launch_sm75(gemm::BlockwiseProblem const& problem, int device, Stream stream) {
  gemm::BlockwiseGemm<gemm::BlockwiseSm75, kSm75Tiles[kRow], kGroup, kBits>::launch(problem, device, stream);
}

}  // namespace epiloq::ops::online_quant_mm
