#pragma once

#include "core/checks.h"
#include "problems/quantizers/norm_inputs.h"

namespace epiloq {

// Checks these arguments of a norm. The weight is of x's dtype, or float32 if it may be.
NormInputs check_norm_inputs(Checker const& check, TensorView const& x, TensorView const& weight,
                             std::optional<TensorView> const& residual, std::optional<TensorView> const& residual_out,
                             float eps, bool weight_may_be_float32);

// Whether all of them can be read and written 16 bytes at a time.
bool in_vectors(NormInputs const& inputs, DType x, DType weight, std::int64_t cols);

}  // namespace epiloq
