#pragma once

#include "gemm/generic.cuh"
#include "ops/scaled_mm/configs.h"
#include "ops/scaled_mm/kernels.h"

namespace epiloq::ops::scaled_mm {

template <int kRow, Inputs kInputs, class Epilogue>
void Generic<kRow, kInputs, Epilogue>::launch(gemm::Problem const& problem, int device, Stream stream) {
  gemm::launch_generic<CudaType<kInputs.a>, CudaType<kInputs.b>, Epilogue>(problem, device, stream);
}

}  // namespace epiloq::ops::scaled_mm
