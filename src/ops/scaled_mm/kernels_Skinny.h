#pragma once

#include "gemm/skinny.cuh"
#include "ops/scaled_mm/configs.h"
#include "ops/scaled_mm/kernels.h"

namespace epiloq::ops::scaled_mm {

template <int kRow, Types kTypes, class Epilogue>
void Skinny<kRow, kTypes, Epilogue>::launch(gemm::Problem const& problem, int device, Stream stream) {
  gemm::SkinnyGemm<kSkinnyTiles[kRow], CudaType<kTypes.out>, Epilogue>::launch(problem, device, stream);
}

}  // namespace epiloq::ops::scaled_mm
