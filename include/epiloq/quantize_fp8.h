#pragma once

#include <optional>
#include <string>

#include "epiloq/export.h"
#include "epiloq/granularity.h"
#include "epiloq/tensor.h"

namespace epiloq {

// q = round(clamp(x / scale, -largest, largest)), a division and ties to even; largest is 448 for e4m3fn, 57344 for
// e5m2.
//
// Dynamic (is_static false): the scale of what shares one is measured and written,
//   scale = max(min(amax, scale_ub), eps) / largest
// and never below 2^-126, so zeros give zeros; with ue8m0 it is then rounded up to a power of two. What holds NaN gets
// a NaN scale, what holds Inf an infinite one, so that everything computed from it is NaN. A static scale lets NaN
// through as NaN (0x7f) and saturates infinities.
struct QuantizeFp8 {
  TensorView q;  // […, Kp] float8_e4m3fn or float8_e5m2, rows dense, Kp >= K; columns past K are set to 0
  TensorView x;  // […, K] float32, float16 or bfloat16, rows dense; for blocks [N, K]
  // float32: 1 element; [M], [M, 1] or […, 1]; […, ceil(K / g)]; [ceil(N / g), ceil(K / g)]. The last two may lie
  // either way round, their rows dense or their columns.
  TensorView scale;
  Granularity granularity = Granularity::kTensor;
  int group_size = 128;
  bool is_static = false;
  bool ue8m0 = false;
  float eps = 0.f;                       // the least amax
  std::optional<TensorView> scale_ub{};  // float32, 1 element: the largest amax
};

EPILOQ_API void check(QuantizeFp8 const& call);
EPILOQ_API std::string explain(QuantizeFp8 const& call);  // the kernel's name; throws what the call would
// On the CPU too, whatever the stream.
EPILOQ_API void quantize_fp8(QuantizeFp8 const& call, Stream stream);

}  // namespace epiloq
