#pragma once

#include "gemm/generic.cuh"
#include "ops/scaled_mm/kernels.h"

namespace epiloq::ops::scaled_mm {

template <int, DType kOut, class Epilogue>
void launch_generic(gemm::Problem const& problem, int device, Stream stream) {
  gemm::launch_generic<CudaType<kOut>, Epilogue>(problem, device, stream);
}

}  // namespace epiloq::ops::scaled_mm
