#pragma once

#include <cstdint>
#include <optional>

#include "epiloq/export.h"
#include "epiloq/tensor.h"

namespace epiloq {

// Each row is cut into blocks of group_size values, the last of which may be short; each block has its own parameters,
// x being about scale * q + offset:
//   scale = (hi - lo) / 255, offset = hi - 127 * scale          (symmetric: scale = amax / 127, no offset)
//   q = clamp(round((x - offset) / scale), -128, 127), a division and ties to even; sum = the block's sum of q
// A constant block (symmetric: of zeros) has scale 1 and offset hi. The scale is never below 2^-126. A block with NaN,
// an infinity, or a range past the largest float has NaN for parameters, and q = 0.
struct QuantizeBlockwiseInt8 {
  TensorView q;                        // […, K] int8, rows dense
  TensorView x;                        // […, K] float32, float16 or bfloat16, rows dense
  TensorView scale;                    // […, G] float32, contiguous, G = ceil(K / group_size)
  std::optional<TensorView> offset{};  // […, G] float32; none when symmetric
  TensorView sum;                      // […, G] int32
  std::int64_t group_size = 128;
};

EPILOQ_API void check(QuantizeBlockwiseInt8 const& call);
// On the CPU too, whatever the stream.
EPILOQ_API void quantize_blockwise_int8(QuantizeBlockwiseInt8 const& call, Stream stream);

}  // namespace epiloq
