#pragma once

#include <cstdint>

#include "epiloq/tensor.h"

namespace epiloq::gemm {

// Scales of a matrix by row and by 128 of K; a scale serves 2^shift rows (1 or 128).
struct GroupScales {
  float const* ptr = nullptr;
  int stride_row = 0, stride_k = 0;  // checked to reach no further than int does
  int shift = 0;

  friend bool operator==(GroupScales const&, GroupScales const&) = default;
};

// D [m, n] = sum over blocks i of 128 along K, or all of it, of scale_a[m, i] scale_b[n, i] A_i B_i^T, plus bias; A [m,
// k], B [n, k]. With experts, A and D hold rows of all of them and B and scale_b are stacked: expert e owns the rows
// that end at offs[e] and begin where the one before it ends, or the first masked_m[e] of each m rows.
struct GroupwiseProblem {
  int m = 0, n = 0, k = 0;
  int experts = 1;
  int depth = 128;  // of K, to a scale: 128, or at least k
  std::int64_t stride_a = 0, stride_b = 0, stride_d = 0;
  void const* a = nullptr;
  void const* b = nullptr;
  void* d = nullptr;
  GroupScales scale_a, scale_b;
  int scale_b_expert = 0;      // from one expert's scales to the next's
  void const* bias = nullptr;  // [n], of D's type
  // With scales of whole rows azp azp_adj is taken off A B^T first; a null azp stands for 1, a null azp_adj for none.
  std::int32_t const* azp_adj = nullptr;  // [n]
  std::int32_t const* azp = nullptr;      // for a row, or of stride 0
  int azp_stride = 0;
  std::int32_t const* offs = nullptr;
  std::int32_t const* masked_m = nullptr;
  // Blocks of a cluster that share a tile's K: 1, or 2 without experts, where groupwise_split_k.h finds tiles to share
  // and each block has a step of 128.
  int split_k = 1;
  bool constant_b = false;  // nothing that may still run when this kernel starts writes B; not of experts

  friend bool operator==(GroupwiseProblem const&, GroupwiseProblem const&) = default;
};

using GroupwiseLaunch = void (*)(GroupwiseProblem const&, int device, Stream);

constexpr int kGroupDepth = 128;  // of K, to a scale

}  // namespace epiloq::gemm
