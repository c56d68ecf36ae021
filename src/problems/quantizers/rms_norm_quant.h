#pragma once

#include "epiloq/tensor.h"
#include "problems/quantizers/norm_inputs.h"
#include "problems/quantizers/quantized_rows.h"

namespace epiloq::ops::rms_norm_quant {

struct Problem {
  QuantizedRows out;
  NormInputs in;
};

// Four vectors of float32 beside the residual's do not fit a thread's registers.
constexpr int kernels(DType x) { return x == DType::kFloat32 ? 2 : 3; }

void launch(Problem const& problem, RowPlan const& plan, DType x, DType q, int device, Stream stream);

}  // namespace epiloq::ops::rms_norm_quant
