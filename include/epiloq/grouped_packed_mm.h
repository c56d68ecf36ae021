#pragma once

#include <optional>
#include <string>

#include "epiloq/device.h"
#include "epiloq/export.h"
#include "epiloq/tensor.h"
#include "epiloq/weight_only_mm.h"

namespace epiloq {

// A kernel by name, for tests and tuning: a row of kRows in src/kernels/launch/grouped_packed_mm.h or, counted on, of
// kExpertRows and kExpertDecodeRows in expert_tiles.h and kExpertGemvRows in expert_gemv.h; and the number of slices
// that K is split into (one CTA of a cluster each, on SM90).
struct GroupedPackedMmKernel {
  int row = 0;
  int split = 1;
};

// For each expert e: out = factor[e] * X_e W_e^T + bias[e], summed in fp32 and rounded once. Without counts there is
// one expert with all rows. On a CUDA device; on the CPU one FP4 matrix.
struct GroupedPackedMm {
  TensorView out;       // [M, N], masked [E, M, N], of x's dtype, rows dense
  TensorView x;         // [M, K], rows sorted by expert; masked [E, M, K]; 16 bits (on the CPU float32 too), rows dense
  PackedWeight weight;  // [E N, K]: the experts' weights stacked, N a multiple of 16 if there are several
  std::optional<TensorView> counts{};  // int32 [E]: where each expert's rows end, ascending; masked: how many it has
  bool masked = false;
  std::optional<TensorView> bias{};               // [E, N] of x's dtype
  std::optional<TensorView> factor{};             // float32 [E]
  std::optional<GroupedPackedMmKernel> kernel{};  // none: dispatch chooses
  int threads = 1;                                // on the CPU, at most (threads.h)
};

// What the choice of a kernel depends on, for dense, aligned rows of x, and no real offsets.
struct GroupedPackedMmProblem {
  std::int64_t m = 0, n = 0, k = 0;  // m: rows of all experts; masked: that each expert has room for
  std::optional<int> experts{};      // none: one matrix, without counts
  bool masked = false;
  WeightFormat format = WeightFormat::kInteger;
  int bits = 4;
  std::int64_t group_size = 128;  // of integers; -1: the whole row
  DType dtype = DType::kBFloat16;
  bool same_type = true;         // scales of integers and x
  bool has_gaps = false;         // masked: between experts' rows of x
  bool batch_invariant = false;  // batch_invariant.h
};

EPILOQ_API void check(GroupedPackedMm const& call);

// On the CPU computes and returns true. On CUDA launches and returns true; or does nothing and returns false if no
// kernel supports the problem: float32, rows of x that are not 16-byte aligned, bits other than 4 and 8, real offsets,
// groups that are neither 32, 64 nor 128 times a power of two. Counts are read on the device: those that do not ascend,
// or exceed x's rows, leave rows unwritten or wrong, and reach no other memory. Rows of `out` that belong to no expert
// are not written.
EPILOQ_API bool grouped_packed_mm(GroupedPackedMm const& call, Stream stream);
// Name of the kernel chosen for a problem, or "no kernel: " and the reason; the tables are the same in every build.
EPILOQ_API std::string explain_grouped_packed_mm(GroupedPackedMmProblem const& problem, Arch arch, int sm_count);
EPILOQ_API std::string explain(GroupedPackedMm const& call);
// Whether experts of many rows have a WGMMA kernel, which `grouped_packed_mm` uses from a few rows per expert on; on a
// device or, for kNoDevice, on the first card of `arch`.
EPILOQ_API bool has_expert_wgmma(GroupedPackedMmProblem const& problem, Arch arch, int device);

}  // namespace epiloq
