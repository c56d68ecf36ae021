#pragma once

#include "core/checks.h"

namespace epiloq {

// Inputs of an RMS norm, and the sum with the residual, which it writes.
struct NormInputs {
  void const* x;
  void const* weight;
  void const* residual;  // null: none
  void* residual_out;
  std::int64_t stride_x, stride_residual, stride_residual_out;
  float eps;
};

// Checks these arguments of a norm. The weight is of x's dtype, or float32 if it may be.
NormInputs check_norm_inputs(Checker const& check, TensorView const& x, TensorView const& weight,
                             std::optional<TensorView> const& residual, std::optional<TensorView> const& residual_out,
                             float eps, bool weight_may_be_float32);

// Whether all of them can be read and written 16 bytes at a time.
bool in_vectors(NormInputs const& inputs, DType x, DType weight, std::int64_t cols);

}  // namespace epiloq
