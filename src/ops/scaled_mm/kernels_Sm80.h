#pragma once

#include "gemm/sm80.h"
#include "ops/scaled_mm/configs.h"
#include "ops/scaled_mm/kernels.h"

namespace epiloq::ops::scaled_mm {

template <int kRow, Inputs kInputs, class Epilogue>
void Sm80<kRow, kInputs, Epilogue>::launch(gemm::Problem const& problem, int device, Stream stream) {
  gemm::MmaGemm<Arch::kSm80, kSm80Tiles[kRow], kInputs, Epilogue>::launch(problem, device, stream);
}

}  // namespace epiloq::ops::scaled_mm
