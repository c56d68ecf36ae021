#pragma once

#include <optional>
#include <string>

#include "epiloq/device.h"
#include "epiloq/export.h"
#include "epiloq/tensor.h"
#include "epiloq/tuning.h"

namespace epiloq {

// D[m, n] = sum over blocks i of 128 along K of scale_a[m, i] scale_b[i, n] (A_i B_i)[m, n], plus bias[n]: float8 with
// scales per group, as in DeepSeek-V3. Each block's product is accumulated in fp32.
//
// With experts (b of three dimensions), rows of A belong to one expert each: to e where offs[e - 1] <= row < offs[e],
// or, with masked_m, the first masked_m[e] rows of a[e]. On a GPU neither is read on the host. With experts the
// scales may also be per row, and the values then also int8: scale_a[m] (scale_b[n] (A B)[m, n]), K at most 131,071.
//
// Supported (rows, columns, depth) per scale: (1, 128, 128), (128, 128, 128) and (1, 1, 128), with experts (1, 128,
// 128), (1, 1, 128) and (1, 1, -1). Messages call this the `recipe`, as Python does.
struct GroupwiseMm {
  TensorView out;      // […, M, N] float16, bfloat16 or float32, rows dense
  TensorView a;        // […, M, K] float8 E4M3, or int8 with scales per row; rows dense
  TensorView b;        // [K, N] of a's kind, columns dense; with experts [E, K, N]
  TensorView scale_a;  // float32 […, M, K/128 rounded up], or one a block of rows, any strides
  TensorView scale_b;  // float32 [K/128, N/128 rounded up] or [K/128, N], any strides; with experts [E, …]
  std::optional<TensorView> bias{};      // [N], out's dtype
  int rows_per_scale = 1;                // of A: 1 or 128
  int columns_per_scale = 128;           // of B: 1 or 128
  int depth_per_scale = 128;             // of K: 128, or -1 for all of it (scale_a [M, 1], scale_b [E, 1, N])
  std::optional<TensorView> offs{};      // int32 [E], ascending, the last at most M
  std::optional<TensorView> masked_m{};  // int32 [E], at most M each; a and out are [E, M, …] then
  // B is a model's weight, as in scaled_mm.h; without experts. Unsafe if a preceding kernel that triggers programmatic
  // dependent launch may still be writing B.
  bool constant_b = false;
  int threads = 1;  // on the CPU, at most (threads.h)
};

// What the choice of a kernel depends on.
struct GroupwiseMmProblem {
  std::int64_t m = 0, n = 0, k = 0;
  bool column_scales = false;   // of B, one a column
  bool aligned = true;          // 16-byte rows in A and B: what TMA needs
  int experts = 1;              // whose rows are shared out evenly, as far as the host knows
  bool per_row_scales = false;  // of all of K
  DType a = DType::kFloat8E4M3;
  bool has_experts = false;       // offs or masked_m, if for one expert
  bool batch_invariant = false;   // batch_invariant.h
  bool whole_row_scales = false;  // with column_scales: A's scales have stride 0 along K, one for all of a row
  DType out = DType::kBFloat16;   // float32 has no kernels for whole_row_scales

  bool operator==(GroupwiseMmProblem const&) const = default;
};

EPILOQ_API void check(GroupwiseMm const& call);
EPILOQ_API void groupwise_mm(GroupwiseMm const& call, Stream stream);
EPILOQ_API void groupwise_mm(GroupwiseMm const& call);  // on the CPU
// As in scaled_mm.h.
EPILOQ_API std::string explain_groupwise_mm(GroupwiseMmProblem const& problem, Arch arch, int sm_count,
                                            bool terms = false);
EPILOQ_API std::string explain(GroupwiseMm const& call, bool terms = false);
EPILOQ_API KernelCandidates candidates(GroupwiseMmProblem const& problem, int device);

}  // namespace epiloq
