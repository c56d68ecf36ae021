#pragma once

#include "gemm/generic.cuh"
#include "ops/scaled_mm/configs.h"
#include "ops/scaled_mm/kernels.h"

namespace epiloq::ops::scaled_mm {

template <int kRow, Types kTypes, class Epilogue>
void Generic<kRow, kTypes, Epilogue>::launch(gemm::Problem const& problem, int device, Stream stream) {
  gemm::launch_generic<CudaType<kTypes.a>, CudaType<kTypes.b>, CudaType<kTypes.out>, Epilogue>(problem, device, stream);
}

}  // namespace epiloq::ops::scaled_mm
