#include "epiloq/rms_norm_quant.h"

#include "api/checks/norm_inputs.h"
#include "api/checks/quantized_rows.h"
#include "cpu/quantize/fused.h"
#include "epiloq/batch_invariant.h"
#include "epiloq/device.h"
#include "problems/quantizers/rms_norm_quant.h"

namespace epiloq {
namespace {

using ops::rms_norm_quant::Problem;

Problem checked(RmsNormQuant const& call) {
  Checker const check("rms_norm_quant", call.x.device);
  Problem problem{};
  problem.in = check_norm_inputs(check, call.x, call.weight, call.residual, call.residual_out, call.eps, false);
  std::int64_t const cols = call.x.shape[call.x.rank - 1];
  problem.out = check_quantized(check, call.q, call.scale, call.x, cols, call.granularity, call.group_size, call.ue8m0);
  check.apart("out", call.q, "weight", call.weight);
  check.apart("scale", call.scale, "weight", call.weight);
  if (call.residual) {
    check.apart("residual_out", *call.residual_out, "scale", call.scale);
    check.apart("out", call.q, "residual", *call.residual);
    check.apart("out", call.q, "residual_out", *call.residual_out);
    check.apart("scale", call.scale, "residual", *call.residual);
  }
  return problem;
}

RowPlan plan_of(RmsNormQuant const& call, Problem const& p) {
  bool const whole = in_vectors(p.in, call.x.dtype, call.x.dtype, p.out.cols);
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
