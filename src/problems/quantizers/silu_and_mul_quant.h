#pragma once

#include "epiloq/gate.h"
#include "epiloq/tensor.h"
#include "problems/quantizers/quantized_rows.h"

namespace epiloq::ops::silu_and_mul_quant {

struct Problem {
  QuantizedRows out;
  void const* x;  // gates, followed by out.cols factors
  std::int64_t stride_x;
  Gate gate;  // as check_gate returns it
};

void launch(Problem const& problem, RowPlan const& plan, DType x, DType q, int device, Stream stream);

}  // namespace epiloq::ops::silu_and_mul_quant
