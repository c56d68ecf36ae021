#pragma once

#include "gemm/skinny.cuh"
#include "ops/scaled_mm/configs.h"
#include "ops/scaled_mm/kernels.h"

namespace epiloq::ops::scaled_mm {

template <int kRow, DType kOut, class Epilogue>
void launch_skinny(gemm::Problem const& problem, int device, Stream stream) {
  gemm::SkinnyGemm<kSkinnyTiles[kRow], CudaType<kOut>, Epilogue>::launch(problem, device, stream);
}

}  // namespace epiloq::ops::scaled_mm
