#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "epiloq/device.h"
#include "epiloq/export.h"
#include "epiloq/tensor.h"
#include "epiloq/tuning.h"

namespace epiloq {

// A weight [N, K] of 2, 3, 4 or 8 bits in the kernels' order: W[n, k] = scale (q - zero), or scale q + offset.
//
// Rows lie in panels of 16, K is padded to a multiple Kp of 128, and a group of columns shares its parameters: there
// are ceil(Kp / group_size) groups. Bytes past N and K may hold anything. A tile is 16 rows by `depth` columns, 32 of 8
// bits and 64 of fewer, in 32 lanes of 16 bytes, or of 8 and 12 for 2 and 3 bits. Within a group, the parameters of
// row r of a panel are at index r % 8 * 2 + r / 8. src/problems/packed_layout.h has the order within a lane;
// epiloq.pack_weight (Python) writes it. Columns of a weight with an activation order are in the order of their groups;
// the caller must permute X likewise.
//
// Or FP4: codes E2M1 (code c's value is +-{0, .5, 1, 1.5, 2, 3, 4, 6}, the sign in bit 3) of 4 bits, without zero
// points and offsets, whose scales are bytes. MXFP4: 2^(byte - 127) for 32 columns, 255 is NaN. NVFP4: E4M3 for 16
// columns, not negative, as bits 7 to 14 of 128 times the scale as a half; codes are 0 where the scale is 0.
enum class WeightFormat { kInteger, kMxfp4, kNvfp4 };

struct PackedWeight {
  TensorView q;                        // uint8 [panels, Kp / depth, 32, bytes a lane]
  TensorView scale;                    // float16, bfloat16 or float32 [panels, groups, 16]
  std::optional<TensorView> zero{};    // uint8, shaped like scale, at most 2^bits; with neither it is 2^(bits - 1)
  std::optional<TensorView> offset{};  // like scale
  int bits = 4;
  std::int64_t n = 0, k = 0;
  std::int64_t group_size = -1;  // columns a group, the last may be short; -1: the whole row
  WeightFormat format = WeightFormat::kInteger;
};

// kDense: no kernel; the weight is dequantised, then multiplied with a dense product.
enum class WeightOnlyMmFamily { kDense, kGemv, kTiled, kDecode, kWgmma };

// A kernel by name, for tests and tuning: a row of a family's table in
// src/dispatch/weight_only_mm/tables.h, and the number of slices that K is split into (one CTA of a cluster each).
struct WeightOnlyMmKernel {
  WeightOnlyMmFamily family = WeightOnlyMmFamily::kGemv;
  int row = 0;
  int split = 1;
};

// D = min(max(X W^T + bias, lo), hi), summed in fp32 and rounded once.
struct WeightOnlyMm {
  TensorView out;  // […, M, N], x's dtype, rows dense
  TensorView x;    // […, M, K] float16, bfloat16 or float32, rows dense
  PackedWeight weight;
  std::optional<TensorView> bias{};  // [N], x's dtype
  float lo = -__builtin_inff(), hi = __builtin_inff();
  std::optional<WeightOnlyMmKernel> kernel{};  // none: dispatch chooses
  int threads = 1;                             // on the CPU, at most (threads.h)
};

// out = W: the products and the sums of the definition above each rounded to fp32, then to out's dtype. Of an 8-bit
// type: the integers q - zero without their scales, exactly, as the operand of an 8-bit product.
struct DequantizeWeight {
  TensorView out;  // [N, K], contiguous: float16, bfloat16 or float32; or, without offsets, float8 E4M3 (at most 4
                   // bits) or int8 (8 bits only without zero points)
  PackedWeight weight;
};

// What the choice of a kernel depends on.
struct WeightOnlyMmProblem {
  std::int64_t m = 0, n = 0, k = 0;
  int bits = 4;
  std::int64_t group_size = -1;
  DType dtype = DType::kFloat16;
  bool aligned = true;           // 16-byte rows in X
  int scale_bytes = 2;           // of a row and group
  int zero_bytes = 0;            // likewise, where there are zero points
  bool offsets = false;          // of the scales' type
  bool same_type = true;         // scales and X
  bool batch_invariant = false;  // batch_invariant.h

  bool operator==(WeightOnlyMmProblem const&) const = default;
};

// Throw InvalidArgument for an argument that does not fit. Work without CUDA.
EPILOQ_API void check(WeightOnlyMm const& call);
EPILOQ_API void check(DequantizeWeight const& call);

// On CUDA launches, on the CPU computes, and returns true; or on CUDA does nothing and returns false if the
// weight should be dequantised for a dense product (large M; no kernel for the problem).
//
// On SM90 the packed weight is read before the stream's previous kernels have finished. Unsafe if
// a preceding kernel that triggers programmatic dependent launch, as epiloq's do, may still be writing it. Copies and
// element-wise kernels of eager torch are safe.
EPILOQ_API bool weight_only_mm(WeightOnlyMm const& call, Stream stream);

// On the CPU or on CUDA.
EPILOQ_API void dequantize_weight(DequantizeWeight const& call, Stream stream);

// Name of the kernel chosen for a problem; with `terms`, the cost model's terms of it and of the
// runner-up.
EPILOQ_API std::string explain_weight_only_mm(WeightOnlyMmProblem const& problem, Arch arch, int sm_count,
                                              int memory_gb_s, bool terms = false);
EPILOQ_API std::string explain(WeightOnlyMm const& call, bool terms = false);
EPILOQ_API KernelCandidates candidates(WeightOnlyMmProblem const& problem, int device);  // as of scaled_mm.h

// The numbers of SM90's cost model, by name; and the problem's `candidates` with the microseconds that it expects with
// other numbers, in that order. For fitting them (tools/tune.py).
EPILOQ_API std::vector<std::pair<std::string, double>> weight_only_mm_costs();
EPILOQ_API std::vector<std::pair<WeightOnlyMmKernel, double>> expected_weight_only_mm(
    WeightOnlyMmProblem const& problem, int memory_gb_s, std::vector<double> const& costs);

}  // namespace epiloq
