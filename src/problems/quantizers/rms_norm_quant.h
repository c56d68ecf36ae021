#pragma once

#include "problems/quantizers/quantized_rows.h"

namespace epiloq::ops::rms_norm_quant {

struct Problem {
  QuantizedRows out;
  void const* x;
  void const* weight;
  void const* residual;  // null: none
  void* residual_out;
  std::int64_t stride_x, stride_residual, stride_residual_out;
  float eps;
};

// Four vectors of float32 beside the residual's do not fit a thread's registers.
constexpr int kernels(DType x) { return x == DType::kFloat32 ? 2 : 3; }

void launch(Problem const& problem, RowPlan const& plan, DType x, DType q, int device, Stream stream);

}  // namespace epiloq::ops::rms_norm_quant
