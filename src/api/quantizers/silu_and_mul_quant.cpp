#include "epiloq/silu_and_mul_quant.h"

#include "api/checks/gate.h"
#include "api/checks/quantized_rows.h"
#include "cpu/quantize/fused.h"
#include "epiloq/device.h"
#include "problems/quantizers/silu_and_mul_quant.h"

namespace epiloq {
namespace {

using ops::silu_and_mul_quant::Problem;

Problem checked(SiluAndMulQuant const& call) {
  Checker const check("silu_and_mul_quant", call.x.device);
  check.tensor("x", call.x, kFloats);
  Matrix const x = check.rows("x", call.x);
  if (x.cols % 2 != 0) check.fail("x", "expected an even number of columns, gates and factors, got ", describe(call.x));
  return {check_quantized(check, call.q, call.scale, call.x, x.cols / 2, call.granularity, call.group_size, call.ue8m0),
          call.x.data, x.stride, check_gate(check, call.gate)};
}

RowPlan plan_of(SiluAndMulQuant const& call, Problem const& p) {
  return plan_rows(p.out, in_vectors(p.x, call.x.dtype, p.stride_x, p.out.cols),
                   device_properties(call.x.device.index).sm_count);
}

}  // namespace

void check(SiluAndMulQuant const& call) { checked(call); }

std::string explain(SiluAndMulQuant const& call) {
  Problem const problem = checked(call);
  if (call.x.device.type == Device::Type::kCpu) return "cpu, vectorised rows";
  return describe(plan_of(call, problem));
}

void silu_and_mul_quant(SiluAndMulQuant const& call, Stream stream) {
  Problem problem = checked(call);
  if (problem.out.rows == 0) return;
  if (call.x.device.type == Device::Type::kCpu) {
    return ops::silu_and_mul_quant::run_on_host(problem, call.x.dtype, call.q.dtype, call.threads);
  }
  RowPlan const plan = plan_of(call, problem);
  problem.out.lanes = plan.lanes;
  ops::silu_and_mul_quant::launch(problem, plan, call.x.dtype, call.q.dtype, call.x.device.index, stream);
}

#if !EPILOQ_HAS_CUDA
void ops::silu_and_mul_quant::launch(Problem const&, RowPlan const&, DType, DType, int device, Stream) {
  device_properties(device);
}
#endif

}  // namespace epiloq
