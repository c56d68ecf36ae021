#pragma once

#include <cstdint>

#include "epiloq/tensor.h"

namespace epiloq::gemm {

// D [m, n] = clamp(A B^T + bias), A [m, k] and B [n, k] int8 in quantisation blocks along k with FP32 parameters
// [blocks, kinds, padded rows], 3 kinds for A and 2 or 3 for B, as in epiloq/online_quant_mm.h.
struct OnlineQuantGemmProblem {
  int m, n, k;  // k is padded
  int padded_m, padded_n;
  int kinds;  // 3: B has offsets
  std::int8_t const* a;
  std::int8_t const* b;
  // Scale, offset, scale times the sum of q. For SM90 in TF32 parts (kernels/common/ptx/tf32.cuh): [blocks, 3, padded
  // rows, 4], high, low, high, low.
  float const* a_parameters;
  float const* b_parameters;  // scale, sum of the dequantised values, offset
  void const* bias;           // or null
  void* out;
  std::int64_t stride_out;
  DType dtype;  // of bias and out
  float lo, hi;
  // SM90: CTAs of a cluster that split K, and the number of leading tiles whose K is not split.
  int split = 1, whole = 0;

  bool operator==(OnlineQuantGemmProblem const&) const = default;
};

using OnlineQuantGemmLaunch = void (*)(OnlineQuantGemmProblem const&, int device, Stream);

}  // namespace epiloq::gemm
