#pragma once

#include "core/cutlass_types.h"
#include "gemm/sm90.h"
#include "ops/scaled_mm/configs.h"
#include "ops/scaled_mm/kernels.h"

namespace epiloq::ops::scaled_mm {

template <int kRow, DType kOut, class Epilogue>
void launch_sm90(gemm::Problem const& problem, int device, Stream stream) {
  gemm::Sm90Gemm<kSm90Tiles[kRow], CutlassType<kOut>, Epilogue>::launch(problem, device, stream);
}

}  // namespace epiloq::ops::scaled_mm
