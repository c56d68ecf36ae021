#include "epiloq/quantize_int8.h"

#include "core/checks.h"
#include "epiloq/device.h"
#include "problems/quantizers/quantize_int8.h"

namespace epiloq {
namespace {

struct Sizes {
  Matrix x, q;
};

Sizes checked(QuantizeInt8 const& call) {
  Checker const check("quantize_int8", call.x.device);
  check.tensor("x", call.x, kFloats);
  check.tensor("out", call.q, {DType::kInt8});
  Matrix const x = check.rows("x", call.x);
  Sizes const sizes{x, check.rows_like("out", call.q, "x", call.x, x.cols, true)};
  check.tensor("scale", call.scale, {DType::kFloat32});
  bool const one = call.is_static && call.scale.numel() == 1;
  if (!one) check.row_values("scale", call.scale, "x", call.x);
  if (call.azp) {
    check.tensor("azp", *call.azp, {DType::kInt32});
    one ? check.scalar("azp", *call.azp) : check.row_values("azp", *call.azp, "x", call.x);
  }
  constexpr std::int64_t kMaxSize = (std::int64_t{1} << 31) - 1;
  if (sizes.x.rows > kMaxSize || sizes.q.cols > kMaxSize) {
    check.fail("x", "expected at most 2^31 - 1 rows and columns, got ", describe(call.x));
  }
  check.apart("out", call.q, "x", call.x);
  check.apart("out", call.q, "scale", call.scale);
  if (call.azp) check.apart("out", call.q, "azp", *call.azp);
  if (!call.is_static) {
    check.apart("scale", call.scale, "x", call.x);
    if (call.azp) {
      check.apart("azp", *call.azp, "x", call.x);
      check.apart("azp", *call.azp, "scale", call.scale);
    }
  }
  return sizes;
}

}  // namespace

void check(QuantizeInt8 const& call) { checked(call); }

void quantize_int8(QuantizeInt8 const& call, Stream stream) {
  Sizes const sizes = checked(call);
  if (sizes.x.rows == 0) return;
  ops::quantize_int8::Problem problem{};
  problem.rows = static_cast<int>(sizes.x.rows);
  problem.cols = static_cast<int>(sizes.x.cols);
  problem.padded_cols = static_cast<int>(sizes.q.cols);
  problem.stride_x = sizes.x.stride;
  problem.stride_q = sizes.q.stride;
  problem.x = call.x.data;
  problem.q = call.q.as<std::int8_t>();
  problem.scale = call.scale.as<float>();
  problem.azp = call.azp ? call.azp->as<std::int32_t>() : nullptr;
  problem.per_row = call.scale.numel() != 1;
  problem.is_static = call.is_static;
  problem.range_includes_zero = call.range_includes_zero;
  if (call.x.device.type == Device::Type::kCpu) return ops::quantize_int8::run_on_host(problem, call.x.dtype);
  ops::quantize_int8::launch(problem, call.x.dtype, call.x.device.index, stream);
}

#if !EPILOQ_HAS_CUDA
void ops::quantize_int8::launch(Problem const&, DType, int device, Stream) { device_properties(device); }
#endif

}  // namespace epiloq
