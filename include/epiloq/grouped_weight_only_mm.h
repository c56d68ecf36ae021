#pragma once

#include <optional>
#include <string>

#include "epiloq/export.h"
#include "epiloq/tensor.h"
#include "epiloq/weight_only_mm.h"

namespace epiloq {

// A kernel by name, for tests and tuning: a row of kRows in src/kernels/launch/grouped_weight_only_mm.h or, counted on,
// of kExpertRows in expert_wgmma.h; and the number of slices that K is split into (one CTA of a cluster each, on SM90).
struct GroupedWeightOnlyMmKernel {
  int row = 0;
  int split = 1;
};

// For each expert e: out = factor[e] * X_e W_e^T + bias[e], summed in fp32 and rounded once. On a CUDA device. Without
// counts there is one expert with all rows.
struct GroupedWeightOnlyMm {
  TensorView out;       // [M, N], masked [E, M, N], of x's dtype, rows dense
  TensorView x;         // [M, K], rows sorted by expert; masked [E, M, K]; float16 or bfloat16, rows dense
  PackedWeight weight;  // [E N, K]: the experts' weights stacked, N a multiple of 16 if there are several
  std::optional<TensorView> counts{};  // int32 [E]: where each expert's rows end, ascending; masked: how many it has
  bool masked = false;
  std::optional<TensorView> bias{};                   // [E, N] of x's dtype
  std::optional<TensorView> factor{};                 // float32 [E]
  std::optional<GroupedWeightOnlyMmKernel> kernel{};  // none: dispatch chooses
};

EPILOQ_API void check(GroupedWeightOnlyMm const& call);

// Launches and returns true; or does nothing and returns false if no kernel supports the problem: float32, rows of x
// that are not 16-byte aligned, bits other than 4 and 8, real offsets, groups that are neither 32, 64 nor 128 times a
// power of two. Counts are read on the device: those that do not ascend, or exceed x's rows, leave rows unwritten or
// wrong, and reach no other memory. Rows of `out` that belong to no expert are not written.
EPILOQ_API bool grouped_weight_only_mm(GroupedWeightOnlyMm const& call, Stream stream);
EPILOQ_API std::string explain(GroupedWeightOnlyMm const& call);

}  // namespace epiloq
