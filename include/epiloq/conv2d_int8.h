#pragma once

#include <optional>
#include <string>

#include "epiloq/conv2d.h"
#include "epiloq/device.h"
#include "epiloq/export.h"
#include "epiloq/tensor.h"

namespace epiloq {

// A kernel by name, for tests and tuning: a row of the table in
// src/dispatch/conv2d_int8/tables.h, and the number of slices that K is split into (one CTA of a cluster each).
struct Conv2dInt8Kernel {
  int row = 0;
  int split = 1;
};

// An int8 convolution with int8 or dequantised output:
//
//   acc = sum x_q weight                                int32, exact; padding holds input_zero
//   r = min(max(scale (acc - correction) + bias, lo), hi)
//   out = r, computed in float32 or better and rounded to float16, bfloat16 or float32
//   out = min(max(round(r) + output_zero, -128), 127)   int8, ties to even; NaN counts as r = 0
//
// Of real numbers x = input_scale (x_q - input_zero) and weight_scale weight:
//   correction[n] = input_zero (sum of all of weight[n]): padding filled with input_zero makes it the same everywhere,
//                   borders included, and leaves of a padded place input_zero w - input_zero w = 0
//   scale[n] = input_scale weight_scale[n], and bias the layer's, lo and hi real    (floating-point output)
//   scale[n] = input_scale weight_scale[n] / output_scale; bias, lo and hi divided by output_scale    (int8 output)
//
// int8 output is what float64 arithmetic gives on these operands. float32 gives the same wherever round(r) is not in
// doubt: see docs/numerics.md.
struct Conv2dInt8 {
  TensorView out;                          // [B, P, Q, Co] int8, float16, bfloat16 or float32, pixels dense
  TensorView x;                            // [B, H, W, Ci] int8, channels dense
  TensorView weight;                       // [Co, Kh, Kw, Ci / groups] int8, contiguous
  TensorView scale;                        // float32, one or Co
  std::optional<TensorView> bias{};        // [Co] float32
  std::optional<TensorView> correction{};  // [Co] int32; none where input_zero is 0
  int input_zero = 0;                      // -128 to 127
  int output_zero = 0;                     // -128 to 127; of int8 output alone
  float lo = -__builtin_inff(), hi = __builtin_inff();
  Conv2dGeometry geometry{};
  std::optional<Conv2dInt8Kernel> kernel{};  // none: dispatch chooses
};

// Throws InvalidArgument for an argument that does not fit. Works without CUDA.
EPILOQ_API void check(Conv2dInt8 const& call);

// Launches on `stream` of the operands' device. Never allocates, never synchronises.
EPILOQ_API void conv2d_int8(Conv2dInt8 const& call, Stream stream);

// On the CPU, where `has_host_kernel`, on at most `threads` threads (epiloq/threads.h). Throws Unsupported for other
// convolutions.
EPILOQ_API void conv2d_int8_on_host(Conv2dInt8 const& call, int threads);
// Depthwise convolutions, and ones of up to 4 input channels.
EPILOQ_API bool has_host_kernel(Conv2dInt8 const& call);

// Name of the kernel that a call would use.
EPILOQ_API std::string explain(Conv2dInt8 const& call);

// The epilogue alone, on the CPU: out […, Co] from acc int32 of the same shape, both contiguous. The geometry, x and
// weight of `call` are not used.
EPILOQ_API void finish_conv2d_int8(TensorView const& acc, Conv2dInt8 const& call);

}  // namespace epiloq
