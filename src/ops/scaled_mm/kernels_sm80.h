#pragma once

#include "core/cutlass_types.h"
#include "gemm/sm80.h"
#include "ops/scaled_mm/configs.h"
#include "ops/scaled_mm/kernels.h"

namespace epiloq::ops::scaled_mm {

template <int kRow, DType kOut, class Epilogue>
void launch_sm80(gemm::Problem const& problem, int device, Stream stream) {
  gemm::MmaGemm<Arch::kSm80, kSm80Tiles[kRow], CutlassType<kOut>, Epilogue>::launch(problem, device, stream);
}

}  // namespace epiloq::ops::scaled_mm
