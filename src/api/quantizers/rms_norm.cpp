#include "epiloq/rms_norm.h"

#include "api/checks/norm_inputs.h"
#include "api/checks/quantized_rows.h"
#include "cpu/quantize/fused.h"
#include "epiloq/batch_invariant.h"
#include "epiloq/device.h"
#include "problems/quantizers/rms_norm.h"

namespace epiloq {
namespace {

using ops::rms_norm::Problem;

Problem checked(RmsNorm const& call) {
  Checker const check("rms_norm", call.x.device);
  Problem problem{};
  problem.in = check_norm_inputs(check, call.x, call.weight, call.residual, call.residual_out, call.eps, true);
  check.tensor("out", call.out, {call.x.dtype});
  Matrix const out = check_rows(check, call.out, call.x, call.x.shape[call.x.rank - 1]);
  check.apart("out", call.out, "x", call.x);
  check.apart("out", call.out, "weight", call.weight);
  if (call.residual) {
    check.apart("out", call.out, "residual", *call.residual);
    check.apart("out", call.out, "residual_out", *call.residual_out);
  }
  problem.rows = static_cast<int>(out.rows);
  problem.cols = static_cast<int>(out.cols);
  problem.out = call.out.data;
  problem.stride_out = out.stride;
  return problem;
}

RowPlan plan_of(RmsNorm const& call, Problem const& p) {
  // Planned as rows that are quantised with one scale each.
  QuantizedRows rows{};
  rows.rows = batch_invariant() ? 1 : p.rows;  // the order in which squares are summed depends on a row's threads
  rows.cols = rows.padded_cols = rows.tile_cols = p.cols;
  bool const whole = in_vectors(p.in, call.x.dtype, call.weight.dtype, p.cols) &&
                     in_vectors(p.out, call.x.dtype, p.stride_out, p.cols);
  return plan_rows(rows, whole, device_properties(call.x.device.index).sm_count,
                   ops::rms_norm::kernels(call.x.dtype, call.weight.dtype));
}

}  // namespace

void check(RmsNorm const& call) { checked(call); }

std::string explain(RmsNorm const& call) {
  Problem const problem = checked(call);
  if (call.x.device.type == Device::Type::kCpu) return "cpu, vectorised rows";
  return describe(plan_of(call, problem));
}

void rms_norm(RmsNorm const& call, Stream stream) {
  Problem const problem = checked(call);
  if (problem.rows == 0 || problem.cols == 0) return;
  if (call.x.device.type == Device::Type::kCpu) {
    return ops::rms_norm::run_on_host(problem, call.x.dtype, call.weight.dtype, call.threads);
  }
  ops::rms_norm::launch(problem, plan_of(call, problem), call.x.dtype, call.weight.dtype, call.x.device.index, stream);
}

#if !EPILOQ_HAS_CUDA
void ops::rms_norm::launch(Problem const&, RowPlan const&, DType, DType, int device, Stream) {
  device_properties(device);
}
#endif

}  // namespace epiloq
