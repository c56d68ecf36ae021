#include "epiloq/conv2d_int8.h"

#include <algorithm>

#include "api/checks/conv2d_geometry.h"
#include "core/checks.h"
#include "core/threads.h"
#include "cpu/conv2d/int8.h"
#include "dispatch/arch.h"
#include "dispatch/conv2d_int8/launch.h"
#include "dispatch/conv2d_int8/select.h"

namespace epiloq {
namespace {

namespace conv = ops::conv2d_int8;

// x_q - z| <= 255 and |w| <= 128 keep a sum of this many products within int32.
constexpr std::int64_t kMaxTerms = ((std::int64_t{1} << 31) - 1) / (255 * 128);

conv::Finish checked_finish(Checker const& check, Conv2dInt8 const& call) {
  std::int64_t const co = call.out.size(-1);
  auto const expect_int8 = [&check](char const* argument, int value) {
    if (value < -128 || value > 127) check.fail(argument, "expected -128 to 127, got ", value);
  };
  expect_int8("input_zero", call.input_zero);
  expect_int8("output_zero", call.output_zero);
  check.clamp(call.lo, call.hi);
  auto const channels = [&](char const* argument, TensorView const& view, DType dtype) {
    check.tensor(argument, view, {dtype});
    check.vector(argument, view, co);
    check.apart("out", call.out, argument, view);
  };
  check.tensor("scale", call.scale, {DType::kFloat32});
  if (call.scale.numel() != 1) check.vector("scale", call.scale, co);
  check.apart("out", call.out, "scale", call.scale);
  if (call.bias) channels("bias", *call.bias, DType::kFloat32);
  if (call.correction) channels("correction", *call.correction, DType::kInt32);
  return {call.scale.as<float>(),
          call.scale.numel() != 1,
          call.correction ? call.correction->as<std::int32_t>() : nullptr,
          call.bias ? call.bias->as<float>() : nullptr,
          call.output_zero,
          call.lo,
          call.hi};
}

void check_out(Checker const& check, TensorView const& out) {
  check.tensor("out", out, {DType::kInt8, DType::kFloat16, DType::kBFloat16, DType::kFloat32});
}

conv::Problem checked(Conv2dInt8 const& call) {
  Checker const check("conv2d_int8", call.x.device);
  check.tensor("x", call.x, {DType::kInt8});
  check.tensor("weight", call.weight, {DType::kInt8});
  check_out(check, call.out);
  TensorView const& w = call.weight;
  if (w.rank != 4) check.fail("weight", "expected 4 dimensions [Co, Kh, Kw, Ci / groups], got ", describe(w));
  check.contiguous("weight", w);
  ops::conv2d::Shape const shape =
      ops::conv2d::checked_shape(check, call.out, call.x, {w.size(0), w.size(1), w.size(2), w.size(3)}, call.geometry);
  std::int64_t const terms = w.size(1) * w.size(2) * w.size(3);
  if (terms > kMaxTerms) {
    check.fail("weight", "expected at most ", kMaxTerms, " values an output channel, where int32 sums are exact, got ",
               terms);
  }
  check.apart("out", call.out, "x", call.x);
  check.apart("out", call.out, "weight", w);
  if (call.input_zero != 0 && !call.correction) check.fail("correction", "expected one with input_zero, got none");
  return {shape,          call.x.as<std::int8_t>(), w.as<std::int8_t>(),        call.out.data,
          call.out.dtype, call.input_zero,          checked_finish(check, call)};
}

bool is_empty(conv::Problem const& p) { return p.shape.batch == 0 || p.shape.co == 0; }

}  // namespace

void check(Conv2dInt8 const& call) { checked(call); }

void conv2d_int8(Conv2dInt8 const& call, Stream stream) {
  conv::Problem const problem = checked(call);
  expect_device("conv2d_int8", "x", call.x, Device::Type::kCuda);
  if (is_empty(problem)) return;
  conv::Choice const choice =
      conv::choose(problem, target_of("conv2d_int8", KernelSet::kConvolution, call.x.device), call.kernel);
  conv::launch(choice, problem, call.x.device.index, stream);
}

void conv2d_int8_on_host(Conv2dInt8 const& call, int threads) {
  constexpr std::int64_t kWorth = 1 << 17;  // products worth waking a thread for, which takes a few microseconds
  conv::Problem const problem = checked(call);
  ops::conv2d::Shape const& s = problem.shape;
  if (call.x.device.type != Device::Type::kCpu || !conv::has_direct_kernel(s)) {
    throw Unsupported("epiloq.conv2d_int8: x: expected few channels of a group, on a CPU, got " + describe(call.x));
  }
  if (is_empty(problem)) return;
  std::int64_t const rows = std::int64_t{s.batch} * s.p, products = rows * s.q * s.co * s.kh * s.kw * (s.ci / s.groups);
  share(rows, static_cast<int>(std::clamp<std::int64_t>(products / kWorth, 1, std::max(threads, 1))),
        [&](std::int64_t first, std::int64_t last) { conv::direct_on_host(problem, first, last); });
}

bool has_host_kernel(Conv2dInt8 const& call) { return conv::has_direct_kernel(checked(call).shape); }

std::string explain(Conv2dInt8 const& call) {
  conv::Problem const problem = checked(call);
  if (is_empty(problem)) return "nothing to launch: the output is empty";
  return conv::describe(
      conv::choose(problem, target_of("conv2d_int8", KernelSet::kConvolution, call.x.device), call.kernel));
}

void finish_conv2d_int8(TensorView const& acc, Conv2dInt8 const& call) {
  Checker const check("conv2d_int8", Device{});
  check.tensor("acc", acc, {DType::kInt32});
  check_out(check, call.out);
  Matrix const sums = check.rows("acc", acc), out = check.rows("out", call.out);
  if (sums.rows != out.rows || sums.cols != out.cols) {
    check.fail("out", "expected as many rows and columns as acc, got ", describe(call.out), " for ", describe(acc));
  }
  check.contiguous("acc", acc);
  check.apart("out", call.out, "acc", acc);
  conv::finish_on_host(acc.as<std::int32_t>(), sums.rows, static_cast<int>(sums.cols), checked_finish(check, call),
                       call.out.dtype, call.out.data, out.stride);
}

}  // namespace epiloq
