#pragma once

#include <cstdint>

#include "epiloq/tensor.h"

namespace epiloq::gemm {

// Scales of a matrix by row and by 128 of K; one scale per 2^shift rows.
struct GroupScales {
  static constexpr int kPerRow = 0, kPerBlock = 7;  // shifts: one scale per row, or per 128 rows

  float const* ptr = nullptr;
  int stride_row = 0, stride_k = 0;  // the largest offset fits an int
  int shift = kPerRow;

  friend bool operator==(GroupScales const&, GroupScales const&) = default;
};

// D [m, n] = sum over groups i of 128 along K (or all of K) of scale_a[m, i] scale_b[n, i] A_i B_i^T, plus bias; A [m,
// k], B [n, k]. With experts, A and D hold the rows of all experts and B and scale_b are stacked: expert e owns the
// rows from offs[e - 1] to offs[e], or the first masked_m[e] of each m rows.
struct GroupwiseProblem {
  int m = 0, n = 0, k = 0;
  int experts = 1;
  int depth = 128;  // of K per scale: 128, or at least k
  std::int64_t stride_a = 0, stride_b = 0, stride_d = 0;
  void const* a = nullptr;
  void const* b = nullptr;
  void* d = nullptr;
  GroupScales scale_a, scale_b;
  int scale_b_expert = 0;      // offset between two experts' scales
  void const* bias = nullptr;  // [n], D's type
  // With scales per row, azp azp_adj is subtracted from A B^T first; a null azp means 1, a null azp_adj no zero point.
  std::int32_t const* azp_adj = nullptr;  // [n]
  std::int32_t const* azp = nullptr;      // per row, or stride 0
  int azp_stride = 0;
  std::int32_t const* offs = nullptr;
  std::int32_t const* masked_m = nullptr;
  // CTAs of a cluster that split a tile's K: 1, or 2 without experts if groupwise_split_k.h finds tiles to split and
  // each CTA gets at least one K step.
  int split_k = 1;
  bool constant_b = false;  // No kernel that may still be running when this one starts writes B (see
                            // epiloq/scaled_mm.h); not with experts.

  friend bool operator==(GroupwiseProblem const&, GroupwiseProblem const&) = default;
};

using GroupwiseLaunch = void (*)(GroupwiseProblem const&, int device, Stream);

constexpr int kGroupDepth = 128;    // of K per scale
constexpr int kBlockColumns = 128;  // of B per scale of a block

}  // namespace epiloq::gemm
