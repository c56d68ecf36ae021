#pragma once

#include <optional>
#include <string>

#include "epiloq/device.h"
#include "epiloq/export.h"
#include "epiloq/tensor.h"
#include "epiloq/tuning.h"

namespace epiloq {

// D = scale_a * scale_b * (A B - azp * azp_adj) + bias. A B is exact in int32 for int8 operands and summed in fp32 for
// float8 ones, which have no zero point; the rest is in fp32. Of int8 K is at most 131,071, with azp_adj 65,793: what
// int32 holds.
//
// Four epilogues, by what is given:
//   ScaledEpilogue              neither bias nor zero point
//   ScaledEpilogueBias          bias
//   ScaledEpilogueAzp           azp_adj [N] = azp * column sums of B, multiplied ahead of time (static activations)
//   ScaledEpilogueAzpPerToken   azp_adj [N] = column sums of B, and azp, one zero point a row of A
struct ScaledMm {
  TensorView out;                       // […, M, N] float16 or bfloat16, rows dense (on the CPU float32 too)
  TensorView a;                         // […, M, K] int8, or float8 (E4M3, E5M2), rows dense
  TensorView b;                         // [K, N] of a's kind, columns dense: transposed(weight [N, K])
  TensorView scale_a;                   // float32: one element; [M], [M, 1], or A's leading dimensions, then 1
  TensorView scale_b;                   // float32: one element; [N], [1, N] or [N, 1]
  std::optional<TensorView> bias{};     // [N], out's dtype
  std::optional<TensorView> azp_adj{};  // [N] int32
  std::optional<TensorView> azp{};      // int32, in scale_a's shapes
  bool fast_accum = false;              // float8: leave sums to the tensor core, whose accumulator has about 14 bits
  int threads = 1;                      // on the CPU, at most (threads.h)
  // B is a model's weight: the kernel may load its first tiles before the preceding kernel on the stream has finished.
  // Unsafe if a preceding kernel that triggers programmatic dependent launch may still be writing B. epiloq's kernels
  // are such kernels; one of epiloq's quantisers, or a kernel without dependent launch, in between makes it safe.
  bool constant_b = false;
};

// What the choice of a kernel depends on.
struct ScaledMmProblem {
  std::int64_t m = 0, n = 0, k = 0;
  bool aligned = true;  // 16-byte rows in A, B and D: what TMA and 128-bit copies need
  DType a = DType::kInt8, b = DType::kInt8;
  bool fast_accum = false;
  std::int64_t batches = 1;      // of a scaled_bmm
  bool int8_out = false;         // scaled_bmm's, with an output scale
  bool batch_invariant = false;  // batch_invariant.h

  bool operator==(ScaledMmProblem const&) const = default;
};

// Throws InvalidArgument for an argument that does not fit. Works without CUDA.
EPILOQ_API void check(ScaledMm const& call);

// Launches on `stream` of the operands' device. Never allocates, never synchronises.
EPILOQ_API void scaled_mm(ScaledMm const& call, Stream stream);
// On the CPU.
EPILOQ_API void scaled_mm(ScaledMm const& call);

// Name of the kernel chosen for a problem, for `explain`; the tables are the same in every build. `terms`: with the
// terms of the cost model, for it and for the runner-up.
EPILOQ_API std::string explain_scaled_mm(ScaledMmProblem const& problem, Arch arch, int sm_count, bool terms = false);
EPILOQ_API std::string explain(ScaledMm const& call, bool terms = false);
// The kernels to choose from on a device; for kNoDevice, on the reference card of the forced architecture.
EPILOQ_API KernelCandidates candidates(ScaledMmProblem const& problem, int device);

// The epilogue alone, on the host, in the same expression as the kernels: out float32 [M, N] from acc int32 [M, N], or
// float32 as float8 products have it.
// For tests; every operand on the CPU and a bias in float32. `call.a` and `call.b` are not used.
EPILOQ_API void evaluate_epilogue(TensorView const& acc, ScaledMm const& call);

}  // namespace epiloq
