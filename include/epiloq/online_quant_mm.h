#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>

#include "epiloq/device.h"
#include "epiloq/export.h"
#include "epiloq/tensor.h"
#include "epiloq/tuning.h"

namespace epiloq {

enum class OnlineQuantFamily { kStaged, kSm75, kSm80, kSm90 };

// A kernel by name, for tests and tuning: a row of a family's table in
// src/dispatch/online_quant_mm/tables.h; on SM90 into how many slices K is split (one CTA of a cluster each), and
// whether that is so in the last wave alone, with two slices.
struct OnlineQuantKernel {
  OnlineQuantFamily family = OnlineQuantFamily::kSm80;
  int row = 0;
  int split = 1;
  bool last_wave = false;
};

// out = clamp(x W^T + bias), x quantised on the way in: each row of x and of W is cut into blocks of group_size along
// K, each with a scale and an offset, and the int8 products of a block are exact. Per block, accumulated in float32:
//   scale_x (scale_w sum(q_x q_w)) + offset_x total_w + scale_x sum(q_x) offset_w
// with total_w = scale_w sum(q_w) + (values in the block) offset_w, the sum of the block's weights.
//
// A prepared weight: K is padded with zeros to a multiple of 128 (Kp), and where group_size divides 128 the blocks are
// counted on Kp (Gp), otherwise on K. At 4 bits (values -8 to 7) 32 values take 16 bytes: byte b holds value b in its
// low half and value b + 16 in its high half.
struct OnlineQuantMm {
  TensorView out;                    // […, M, N] x's dtype, rows dense
  TensorView x;                      // […, M, K] float32, float16 or bfloat16, rows dense
  TensorView values;                 // int8 [N, Kp], or [N, Kp / 2] at 4 bits, contiguous
  TensorView parameters;             // float32 [Gp, 2 or 3, Np], N rounded up to 4: scale, total and offset (if any)
  std::optional<TensorView> bias{};  // [N], x's dtype
  std::int64_t in_features = 0;      // K, of the weight
  std::int64_t group_size = 128;
  int bits = 8;
  float lo = -std::numeric_limits<float>::infinity();
  float hi = std::numeric_limits<float>::infinity();
  bool staged = false;  // the reference on the GPU: quantise, an int32 product a block, accumulate, finish
  int threads = 1;      // on the CPU, at most (threads.h)
  std::optional<OnlineQuantKernel> kernel{};  // on CUDA; none: the one that is chosen
};

// Where CUDA's kernels put the quantised activations, and for the staged pipeline each block's products and their sum.
// The caller allocates; nothing else is needed.
struct OnlineQuantWorkspace {
  TensorView values;  // int8 [M, Kp]
  // float32 [Gp, 3, 4 Mp], M rounded up to 4: scale, offset, scale sum(q). SM90's kernels have four floats of each;
  // others pack [Gp, 3, Mp] at the front.
  TensorView parameters;
  std::optional<TensorView> products{};  // int32 [M, N], staged only
  std::optional<TensorView> sums{};      // float32 [M, N], staged only
};

struct OnlineQuantProblem {
  std::int64_t m = 0, n = 0, k = 0, group_size = 128;
  int bits = 8;
  bool batch_invariant = false;  // batch_invariant.h

  bool operator==(OnlineQuantProblem const&) const = default;
};

EPILOQ_API void check(OnlineQuantMm const& call);
EPILOQ_API void online_quant_mm(OnlineQuantMm const& call, OnlineQuantWorkspace const& workspace, Stream stream);
// On the CPU.
EPILOQ_API void online_quant_mm(OnlineQuantMm const& call);

// Whether there is no fused kernel for a group size, so that only the staged pipeline supports it.
EPILOQ_API bool needs_staging(std::int64_t group_size);

// Name of the kernel chosen for a problem, for `explain`; the tables are the same in every build. `terms`: with the
// terms of the cost model, for it and for the runner-up.
EPILOQ_API std::string explain_online_quant_mm(OnlineQuantProblem const& problem, Arch arch, int sm_count,
                                               int memory_gb_s = 0, bool terms = false);
EPILOQ_API std::string explain(OnlineQuantMm const& call, bool terms = false);
EPILOQ_API KernelCandidates candidates(OnlineQuantProblem const& problem, int device);  // as of scaled_mm.h

}  // namespace epiloq
