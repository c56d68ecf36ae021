#pragma once

#include "gemm/skinny.cuh"
#include "ops/scaled_mm/configs.h"
#include "ops/scaled_mm/kernels.h"

namespace epiloq::ops::scaled_mm {

template <int kRow, Inputs kInputs, class Epilogue>
void Skinny<kRow, kInputs, Epilogue>::launch(gemm::Problem const& problem, int device, Stream stream) {
  gemm::SkinnyGemm<kSkinnyTiles[kRow], Epilogue>::launch(problem, device, stream);
}

}  // namespace epiloq::ops::scaled_mm
