#include "api/checks/norm_inputs.h"

#include <algorithm>
#include <cmath>

#include "api/checks/quantized_rows.h"

namespace epiloq {
namespace {

// A matrix of x's shape and dtype.
Matrix like_x(Checker const& check, char const* argument, TensorView const& view, TensorView const& x) {
  check.tensor(argument, view, {x.dtype});
  bool const same = view.rank == x.rank && std::equal(x.shape.begin(), x.shape.begin() + x.rank, view.shape.begin());
  if (!same) check.fail(argument, "expected x's shape, got ", describe(view), " for ", describe(x));
  return check.rows(argument, view);
}

}  // namespace

NormInputs check_norm_inputs(Checker const& check, TensorView const& x, TensorView const& weight,
                             std::optional<TensorView> const& residual, std::optional<TensorView> const& residual_out,
                             float eps, bool weight_may_be_float32) {
  check.tensor("x", x, kFloats);
  Matrix const rows = check.rows("x", x);
  if (weight_may_be_float32 && x.dtype != DType::kFloat32) {
    check.tensor("weight", weight, {x.dtype, DType::kFloat32});
  } else {
    check.tensor("weight", weight, {x.dtype});
  }
  check.vector("weight", weight, rows.cols);
  if (!(eps >= 0.f) || std::isinf(eps)) check.fail("eps", "expected a finite number of at least 0, got ", eps);
  NormInputs inputs{};
  inputs.x = x.data;
  inputs.weight = weight.data;
  inputs.stride_x = rows.stride;
  inputs.eps = eps;
  if (residual.has_value() != residual_out.has_value()) {
    check.fail("residual", "expected it and residual_out together, got one without the other");
  }
  if (!residual) return inputs;
  TensorView const &in = *residual, &out = *residual_out;
  inputs.stride_residual = like_x(check, "residual", in, x).stride;
  inputs.stride_residual_out = like_x(check, "residual_out", out, x).stride;
  inputs.residual = in.data;
  inputs.residual_out = out.data;
  if (out.data != in.data || out.strides != in.strides) check.apart("residual_out", out, "residual", in);
  check.apart("residual_out", out, "x", x);
  check.apart("residual_out", out, "weight", weight);
  return inputs;
}

bool in_vectors(NormInputs const& inputs, DType x, DType weight, std::int64_t cols) {
  bool const read = in_vectors(inputs.x, x, inputs.stride_x, cols) && in_vectors(inputs.weight, weight, 0, cols);
  if (!read || inputs.residual == nullptr) return read;
  return in_vectors(inputs.residual, x, inputs.stride_residual, cols) &&
         in_vectors(inputs.residual_out, x, inputs.stride_residual_out, cols);
}

}  // namespace epiloq
