#pragma once

#include <optional>
#include <string>

#include "epiloq/export.h"
#include "epiloq/tensor.h"
#include "epiloq/tuning.h"
#include "epiloq/weight_only_mm.h"

namespace epiloq {

// out[m, n] = scale_a[m] * sum over groups g of scale[n, g] * (sum over k in g of (q[n, k] - 8) * x_q[m, k]) + bias[n]:
// float8 activations by a symmetric 4-bit weight, at the tensor cores' 8-bit rate. On a CUDA device of compute
// capability 9.0.
struct W4a8Mm {
  TensorView out;                    // [M, N] float16 or bfloat16, rows dense
  TensorView x_q;                    // [M, K] float8 E4M3, rows dense
  TensorView scale_a;                // float32 [1] or [M], or [M, 1], contiguous
  PackedWeight weight;               // 4 bits, without zero points and offsets
  TensorView scratch;                // uint8 [M, K rounded up to a multiple of 128], contiguous; overwritten
  std::optional<TensorView> bias{};  // [N] of out's type, added in fp32
};

// What the choice of a kernel depends on.
struct W4a8Problem {
  std::int64_t m = 0, n = 0, k = 0, group_size = 128;
  bool batch_invariant = false;  // batch_invariant.h: no tuned kernel

  bool operator==(W4a8Problem const&) const = default;
};

EPILOQ_API void check(W4a8Mm const& call);

// Launches and returns true; or does nothing and returns false if there is no kernel: another device, zero points
// or offsets, scale groups other than 32, 64, powers of two times 128 and whole rows.
//
// The packed weight is read before the stream's previous kernels have finished; see weight_only_mm.h.
EPILOQ_API bool w4a8_mm(W4a8Mm const& call, Stream stream);
// Name of the kernel chosen for a problem, for `explain`; the tables are the same in every build. `terms`: with the
// cost model's terms of the kernel and of the runner-up.
EPILOQ_API std::string explain_w4a8_mm(W4a8Problem const& problem, Arch arch, int sm_count, bool terms = false);
EPILOQ_API std::string explain(W4a8Mm const& call, bool terms = false);
EPILOQ_API KernelCandidates candidates(W4a8Problem const& problem, int device);  // as of scaled_mm.h

// out = bfloat16(scale_a x_q), products in fp32, rounded once: tokens for weight_only_mm. On a CUDA device.
struct WidenTokens {
  TensorView out;      // [M, K] bfloat16, rows dense
  TensorView x_q;      // [M, K] int8 or float8 E4M3, rows dense
  TensorView scale_a;  // float32 [1] or [M], or [M, 1], contiguous
};
EPILOQ_API void widen_tokens(WidenTokens const& call, Stream stream);

}  // namespace epiloq
