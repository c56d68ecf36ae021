#pragma once

#include <optional>

#include "epiloq/export.h"
#include "epiloq/tensor.h"

namespace epiloq {

// q = clamp(round(x / scale) + azp, -128, 127), a division and ties to even.
//
// Dynamic (is_static false): one scale a row is measured and written,
//   symmetric (no azp):  scale = amax / 127
//   asymmetric:          scale = (hi - lo) / 255, azp = round(-128 - lo / scale), [lo, hi] widened to hold 0
// and never below 2^-126, so a row of zeros gives zeros. A row with NaN or Inf gets a scale that is not finite, so
// what is computed from that row is NaN, as it would be in floating point.
struct QuantizeInt8 {
  TensorView q;  // […, Kp] int8, rows dense, Kp >= K; columns past K are set to 0
  TensorView x;  // […, K] float32, float16 or bfloat16, rows dense
  // float32, one a row: [M], [M, 1] or x's leading dimensions, then 1; static: or one element.
  TensorView scale;
  std::optional<TensorView> azp{};  // int32, alike
  bool is_static = false;
  // False: lo and hi as they are, unless they are equal. The zero point then leaves [-128, 127] for rows without a 0.
  bool range_includes_zero = true;
};

EPILOQ_API void check(QuantizeInt8 const& call);
// On the CPU too, whatever the stream.
EPILOQ_API void quantize_int8(QuantizeInt8 const& call, Stream stream);

}  // namespace epiloq
