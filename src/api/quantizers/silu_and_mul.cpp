#include "epiloq/silu_and_mul.h"

#include "api/checks/gate.h"
#include "api/checks/quantized_rows.h"
#include "cpu/quantize/fused.h"
#include "epiloq/device.h"
#include "problems/quantizers/silu_and_mul.h"

namespace epiloq {
namespace {

using ops::silu_and_mul::Problem;

Problem checked(SiluAndMul const& call) {
  Checker const check("silu_and_mul", call.x.device);
  check.tensor("x", call.x, kFloats);
  Matrix const x = check.rows("x", call.x);
  if (x.cols % 2 != 0) check.fail("x", "expected an even number of columns, gates and factors, got ", describe(call.x));
  check.tensor("out", call.out, {call.x.dtype});
  Matrix const out = check_rows(check, call.out, call.x, x.cols / 2);
  check.apart("out", call.out, "x", call.x);
  Problem problem{};
  problem.rows = static_cast<int>(out.rows);
  problem.cols = static_cast<int>(out.cols);
  problem.x = call.x.data;
  problem.out = call.out.data;
  problem.stride_x = x.stride;
  problem.stride_out = out.stride;
  problem.gate = check_gate(check, call.gate);
  problem.interleaved = call.interleaved;
  return problem;
}

bool in_vectors(Problem const& p, DType x) {
  return in_vectors(p.x, x, p.stride_x, p.cols) && in_vectors(p.out, x, p.stride_out, p.cols);
}

}  // namespace

void check(SiluAndMul const& call) { checked(call); }

std::string explain(SiluAndMul const& call) {
  Problem const problem = checked(call);
  if (call.x.device.type == Device::Type::kCpu) return "cpu, vectorised rows";
  return in_vectors(problem, call.x.dtype) ? "cuda, eight elements at a time" : "cuda, element by element";
}

void silu_and_mul(SiluAndMul const& call, Stream stream) {
  Problem const problem = checked(call);
  if (problem.rows == 0 || problem.cols == 0) return;
  if (call.x.device.type == Device::Type::kCpu) {
    return ops::silu_and_mul::run_on_host(problem, call.x.dtype, call.threads);
  }
  bool const whole = in_vectors(problem, call.x.dtype);
  ops::silu_and_mul::launch(problem, whole, call.x.dtype, call.x.device.index, stream);
}

#if !EPILOQ_HAS_CUDA
void ops::silu_and_mul::launch(Problem const&, bool, DType, int device, Stream) { device_properties(device); }
#endif

}  // namespace epiloq
