#pragma once

#include "gemm/blockwise_problem.h"
#include "ops/online_quant_mm/select.h"
#include "ops/quantize_blockwise_int8/kernels.h"

namespace epiloq::ops::online_quant_mm {

// Both halves of a call: the quantising pass writes what the product reads.
struct Work {
  quantize_blockwise_int8::Problem quantise;
  gemm::BlockwiseProblem gemm;
  std::int32_t* products;  // staged only
  float* sums;             // staged only
};

void launch(Choice const& choice, OnlineQuantProblem const& problem, Work const& work, int device, Stream stream);

// The reference: an int32 product a block, and passes over float32 sums.
void launch_staged(Work const& work, int device, Stream stream);

// On the CPU; of `work` what the caller gives, and no workspace.
void run_on_host(OnlineQuantProblem const& problem, Work const& work, int threads);
std::string describe_on_host(OnlineQuantProblem const& problem);

}  // namespace epiloq::ops::online_quant_mm
