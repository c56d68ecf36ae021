#pragma once

#include <optional>
#include <string>

#include "epiloq/conv2d.h"
#include "epiloq/device.h"
#include "epiloq/export.h"
#include "epiloq/tensor.h"
#include "epiloq/weight_only_mm.h"

namespace epiloq {

// A low-bit weight [Co, Kh, Kw, Ci / groups].
//
// Dense (depthwise false): `rows` is the matrix [Co, Kh Kw Cp], column (kh Kw + kw) Cp + c, in weight_only_mm's order.
//   Cp is Ci / groups where Kh = Kw = 1: the convolution is then a product of `rows` with the pixels. Otherwise it is a
//   multiple of 8 not below Ci / groups, and of rows.group_size, unless that is -1 (the whole row): a group lies
//   within one tap, and so do eight consecutive columns. Columns c >= Ci / groups hold anything finite; x counts as 0.
// Depthwise (Ci / groups = 1, one or more outputs a channel): taps side by side, channels innermost, one code a byte
//   whatever `bits` is: rows.q uint8 [Kh, Kw, Co], with a scale and zero or offset an output channel, [Co] each.
//   rows.n = Co, rows.k = Kh Kw, rows.group_size = -1.
// Codes are defined as in PackedWeight: scale (q - zero), scale q + offset, or scale (q - 2^(bits - 1)).
struct PackedConv2dWeight {
  PackedWeight rows;
  bool depthwise = false;
  std::int64_t kh = 1, kw = 1;
  std::int64_t channels = 0;         // Ci / groups
  std::int64_t padded_channels = 0;  // Cp; depthwise: 1
};

// kDense: dequantise the weight, then convolve densely. kPatches and kWgmma: an implicit GEMM with mma.sync or wgmma.
enum class Conv2dWeightOnlyFamily { kDense, kPatches, kWgmma, kDepthwise };

// A kernel by name, for tests and tuning: a row of the table of kPatches or kWgmma in
// src/dispatch/conv2d_weight_only/tables.h, and the number of slices that K is split into (one CTA of a cluster each).
struct Conv2dWeightOnlyKernel {
  Conv2dWeightOnlyFamily family = Conv2dWeightOnlyFamily::kPatches;
  int row = 0;
  int split = 1;
};

// out = min(max(conv(x, W) + bias, lo), hi), summed in fp32 and rounded once.
struct Conv2dWeightOnly {
  TensorView out;  // [B, P, Q, Co], x's dtype, pixels dense
  TensorView x;    // [B, H, W, Ci] float16, bfloat16 or float32, channels dense
  PackedConv2dWeight weight;
  std::optional<TensorView> bias{};  // [Co], x's dtype
  float lo = -__builtin_inff(), hi = __builtin_inff();
  Conv2dGeometry geometry{};
  int threads = 1;                                 // of a product on the CPU, at most
  std::optional<Conv2dWeightOnlyKernel> kernel{};  // none: dispatch chooses; CUDA only
};

// Throws InvalidArgument for an argument that does not fit. Works without CUDA.
EPILOQ_API void check(Conv2dWeightOnly const& call);

// A 1 x 1 kernel with unit strides and no padding is weight_only_mm of the pixels, which must then collapse into rows.
// Launches (on the CPU: computes) and returns true; or does nothing and returns false if the weight has to be
// dequantised for a dense convolution (on the CPU beyond a few pixels; with many pixels; without a kernel for the
// problem). The packed weight is read early, as in weight_only_mm.
EPILOQ_API bool conv2d_weight_only(Conv2dWeightOnly const& call, Stream stream);

// Name of the kernel that a call would use.
EPILOQ_API std::string explain(Conv2dWeightOnly const& call);

}  // namespace epiloq
