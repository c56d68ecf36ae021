#pragma once

#include <string>

#include "epiloq/online_quant_mm.h"
#include "problems/online_quant_gemm.h"
#include "problems/quantizers/quantize_blockwise_int8.h"

namespace epiloq::ops::online_quant_mm {

// Both halves of a call: the quantising kernel writes what the product reads.
struct Work {
  quantize_blockwise_int8::Problem quantise;
  gemm::OnlineQuantGemmProblem gemm;
  std::int32_t* products;  // staged only
  float* sums;             // staged only
};

// The reference: an int32 product per quantisation block, and passes over FP32 sums.
void launch_staged(Work const& work, int device, Stream stream);

// On the CPU; uses the caller's tensors of `work`, and no workspace.
void run_on_host(OnlineQuantProblem const& problem, Work const& work, int threads);
std::string describe_on_host(OnlineQuantProblem const& problem);

}  // namespace epiloq::ops::online_quant_mm
