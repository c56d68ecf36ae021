#pragma once

// The launches of online_quant_mm's kernels: declared for the tables of dispatch/online_quant_mm, and defined and
// instantiated in sources that CMake expands from its kernels.cu.in.

#include "problems/online_quant_gemm.h"

namespace epiloq::ops::online_quant_mm {

template <int kRow, int kGroup, int kBits>
void launch_sm75(gemm::OnlineQuantGemmProblem const& problem, int device, Stream stream);

template <int kRow, int kGroup, int kBits>
void launch_sm80(gemm::OnlineQuantGemmProblem const& problem, int device, Stream stream);

template <int kRow, int kBits>
void launch_sm90(gemm::OnlineQuantGemmProblem const& problem, int device, Stream stream);

}  // namespace epiloq::ops::online_quant_mm
