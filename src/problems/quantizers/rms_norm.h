#pragma once

#include "epiloq/tensor.h"
#include "problems/quantizers/norm_inputs.h"
#include "problems/quantizers/quantized_rows.h"

namespace epiloq::ops::rms_norm {

struct Problem {
  int rows, cols;
  void* out;  // of x's dtype
  std::int64_t stride_out;
  NormInputs in;
};

// The number of one-pass kernels: four vectors of float32 do not fit a thread's registers.
constexpr int kernels(DType x, DType weight) { return x == DType::kFloat32 || weight == DType::kFloat32 ? 2 : 3; }

void launch(Problem const& problem, RowPlan const& plan, DType x, DType weight, int device, Stream stream);

}  // namespace epiloq::ops::rms_norm
