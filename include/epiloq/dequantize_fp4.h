#pragma once

#include <optional>

#include "epiloq/export.h"
#include "epiloq/tensor.h"
#include "epiloq/weight_only_mm.h"

namespace epiloq {

// out = W = e2m1(code) (scale global_scale), the products in fp32 and rounded once to out's type.
//
// Or MXFP4 as float8 E4M3 with a scale per row, for a product of 8-bit operands: W = row_scale out. With m the largest
// scale of a block of the row that is not all zeros, row_scale is m / 64, which makes out exact in blocks whose scales
// are at least m / 2^14. In others it is rounded, to a multiple of 2^-15 m. A NaN scale makes row_scale NaN.
struct DequantizeFp4 {
  TensorView out;                            // [N, K] contiguous: float16, bfloat16, float32; or float8 E4M3
  PackedWeight weight;                       // FP4
  std::optional<TensorView> global_scale{};  // float32 [E], one for each of E stacked matrices of a multiple of 16 rows
  std::optional<TensorView> row_scale{};     // float32 [N], with float8 and only then; written
};

EPILOQ_API void check(DequantizeFp4 const& call);
// On a CUDA device.
EPILOQ_API void dequantize_fp4(DequantizeFp4 const& call, Stream stream);

}  // namespace epiloq
