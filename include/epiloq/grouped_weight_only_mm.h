#pragma once

#include <optional>
#include <string>

#include "epiloq/export.h"
#include "epiloq/tensor.h"
#include "epiloq/weight_only_mm.h"

namespace epiloq {

// A kernel by name, for tests and for finding out which is best: a row of kRows in
// src/kernels/launch/grouped_weight_only_mm.h, and into how many slices K is split (one CTA of a cluster each, on
// SM90).
struct GroupedWeightOnlyMmKernel {
  int row = 0;
  int split = 1;
};

// For each expert e: out = factor[e] * X_e W_e^T + bias[e], summed in fp32 and rounded once. On a CUDA device. Without
// counts there is one expert, which has all rows.
struct GroupedWeightOnlyMm {
  TensorView out;       // [M, N], masked [E, M, N], of x's dtype, rows dense
  TensorView x;         // [M, K], rows sorted by expert; masked [E, M, K]; float16 or bfloat16, rows dense
  PackedWeight weight;  // [E N, K]: the experts' behind each other, N a multiple of 16 where there are several
  std::optional<TensorView> counts{};  // int32 [E]: where each expert's rows end, ascending; masked: how many it has
  bool masked = false;
  std::optional<TensorView> bias{};                   // [E, N] of x's dtype
  std::optional<TensorView> factor{};                 // float32 [E]
  std::optional<GroupedWeightOnlyMmKernel> kernel{};  // none: the one that is chosen
};

EPILOQ_API void check(GroupedWeightOnlyMm const& call);

// Launches and returns true; or does nothing and returns false where no kernel takes the problem: float32, rows of x
// that are not 16-byte aligned, bits other than 4 and 8, real offsets, groups that are neither 32, 64 nor 128 times a
// power of two. Counts are read on the device: those that do not ascend, or exceed x's rows, leave rows unwritten or
// wrong, and reach no other memory. `out`'s rows that are no expert's are not written.
EPILOQ_API bool grouped_weight_only_mm(GroupedWeightOnlyMm const& call, Stream stream);
EPILOQ_API std::string explain(GroupedWeightOnlyMm const& call);

}  // namespace epiloq
