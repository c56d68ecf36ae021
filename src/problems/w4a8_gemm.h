#pragma once

#include <cstdint>

#include "epiloq/tensor.h"

namespace epiloq::gemm {

// D [m, n] = clamp(A B^T + bias), A [m, k] and B [n, k] int8 in blocks along k with float32 parameters, laid out as
// epiloq/online_quant_mm.h says: parameters [blocks, kinds, padded rows], 3 kinds of A's and 2 or 3 of B's.
struct BlockwiseProblem {
  int m, n, k;  // k is padded
  int padded_m, padded_n;
  int kinds;  // 3: B has offsets
  std::int8_t const* a;
  std::int8_t const* b;
  // Scale, offset, scale times the sum of q. For SM90's kernels in tf32 parts (core/tf32.cuh): [blocks, 3,
  // padded rows, 4], high, low, high, low.
  float const* a_parameters;
  float const* b_parameters;  // scale, sum of the de-quantised values, offset
  void const* bias;           // or null
  void* out;
  std::int64_t stride_out;
  DType dtype;  // of bias and out
  float lo, hi;
  // On SM90: how many blocks of a cluster share K, and so many of the first tiles whose K they do not share.
  int split = 1, whole = 0;

  bool operator==(BlockwiseProblem const&) const = default;
};

using BlockwiseLaunch = void (*)(BlockwiseProblem const&, int device, Stream);

}  // namespace epiloq::gemm
