#pragma once

// Where scaled_mm's kernels live: declared here for the launch tables, defined in kernels_<family>.h, and instantiated
// one table row, output type and epilogue at a time in sources that CMake expands from kernels.cu.in.

#include "epiloq/device.h"
#include "gemm/problem.h"

namespace epiloq::ops::scaled_mm {

template <int kRow, DType kOut, class Epilogue>
void launch_sm75(gemm::Problem const&, int device, Stream);
template <int kRow, DType kOut, class Epilogue>
void launch_sm80(gemm::Problem const&, int device, Stream);
template <int kRow, DType kOut, class Epilogue>
void launch_sm90(gemm::Problem const&, int device, Stream);
template <int kRow, DType kOut, class Epilogue>
void launch_skinny(gemm::Problem const&, int device, Stream);
template <int kRow, DType kOut, class Epilogue>  // one row: nothing to choose
void launch_generic(gemm::Problem const&, int device, Stream);

}  // namespace epiloq::ops::scaled_mm
