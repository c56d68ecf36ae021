#include "epiloq/rms_norm_quant.h"

#include <algorithm>
#include <cmath>

#include "cpu/quantize/fused.h"
#include "epiloq/batch_invariant.h"
#include "epiloq/device.h"
#include "problems/quantizers/rms_norm_quant.h"

namespace epiloq {
namespace {

using ops::rms_norm_quant::Problem;

// A matrix of x's shape and dtype.
Matrix like_x(Checker const& check, char const* argument, TensorView const& view, TensorView const& x) {
  check.tensor(argument, view, {x.dtype});
  bool const same = view.rank == x.rank && std::equal(x.shape.begin(), x.shape.begin() + x.rank, view.shape.begin());
  if (!same) check.fail(argument, "expected x's shape, got ", describe(view), " for ", describe(x));
  return check.rows(argument, view);
}

void check_residual(Checker const& check, RmsNormQuant const& call, Problem& problem) {
  if (call.residual.has_value() != call.residual_out.has_value()) {
    check.fail("residual", "expected it and residual_out together, got one without the other");
  }
  if (!call.residual) return;
  TensorView const &in = *call.residual, &out = *call.residual_out;
  problem.stride_residual = like_x(check, "residual", in, call.x).stride;
  problem.stride_residual_out = like_x(check, "residual_out", out, call.x).stride;
  problem.residual = in.data;
  problem.residual_out = out.data;
  if (out.data != in.data || out.strides != in.strides) check.apart("residual_out", out, "residual", in);
  check.apart("residual_out", out, "x", call.x);
  check.apart("residual_out", out, "weight", call.weight);
  check.apart("residual_out", out, "scale", call.scale);
  check.apart("out", call.q, "residual", in);
  check.apart("out", call.q, "residual_out", out);
  check.apart("scale", call.scale, "residual", in);
}

Problem checked(RmsNormQuant const& call) {
  Checker const check("rms_norm_quant", call.x.device);
  check.tensor("x", call.x, kFloats);
  Matrix const x = check.rows("x", call.x);
  check.tensor("weight", call.weight, {call.x.dtype});
  check.vector("weight", call.weight, x.cols);
  if (!(call.eps >= 0.f) || std::isinf(call.eps)) {
    check.fail("eps", "expected a finite number of at least 0, got ", call.eps);
  }
  Problem problem{};
  problem.out =
      check_quantized(check, call.q, call.scale, call.x, x.cols, call.granularity, call.group_size, call.ue8m0);
  check.apart("out", call.q, "weight", call.weight);
  check.apart("scale", call.scale, "weight", call.weight);
  problem.x = call.x.data;
  problem.weight = call.weight.data;
  problem.stride_x = x.stride;
  problem.eps = call.eps;
  check_residual(check, call, problem);
  return problem;
}

RowPlan plan_of(RmsNormQuant const& call, Problem const& p) {
  int const cols = p.out.cols;
  bool whole = in_vectors(p.x, call.x.dtype, p.stride_x, cols) && in_vectors(p.weight, call.x.dtype, 0, cols);
  if (p.residual != nullptr) {
    whole = whole && in_vectors(p.residual, call.x.dtype, p.stride_residual, cols) &&
            in_vectors(p.residual_out, call.x.dtype, p.stride_residual_out, cols);
  }
  QuantizedRows rows = p.out;
  // The order in which a row's squares are summed depends on its threads.
  if (batch_invariant()) rows.rows = 1;
  return plan_rows(rows, whole, device_properties(call.x.device.index).sm_count,
                   ops::rms_norm_quant::kernels(call.x.dtype));
}

}  // namespace

void check(RmsNormQuant const& call) { checked(call); }

std::string explain(RmsNormQuant const& call) {
  Problem const problem = checked(call);
  if (call.x.device.type == Device::Type::kCpu) return "cpu, vectorised rows";
  return describe(plan_of(call, problem));
}

void rms_norm_quant(RmsNormQuant const& call, Stream stream) {
  Problem problem = checked(call);
  if (problem.out.rows == 0) return;
  if (call.x.device.type == Device::Type::kCpu) {
    return ops::rms_norm_quant::run_on_host(problem, call.x.dtype, call.q.dtype, call.threads);
  }
  RowPlan const plan = plan_of(call, problem);
  problem.out.lanes = plan.lanes;
  ops::rms_norm_quant::launch(problem, plan, call.x.dtype, call.q.dtype, call.x.device.index, stream);
}

#if !EPILOQ_HAS_CUDA
void ops::rms_norm_quant::launch(Problem const&, RowPlan const&, DType, DType, int device, Stream) {
  device_properties(device);
}
#endif

}  // namespace epiloq
