#include "epiloq/dequantize_fp4.h"

#include <algorithm>

#include "api/checks/packed_weight.h"
#include "core/checks.h"
#include "epiloq/device.h"
#include "problems/quantizers/dequantize_fp4.h"

namespace epiloq {
namespace {

namespace wo = ops::weight_only_mm;
using ops::dequantize_fp4::Problem;

Problem checked(DequantizeFp4 const& call) {
  Checker const check("dequantize_fp4", call.out.device);
  PackedWeight const& w = call.weight;
  if (w.format == WeightFormat::kInteger) check.fail("weight", "expected FP4, got integers");
  wo::Weight const weight = wo::checked_weight_of_any_format(check, w);
  check.tensor("out", call.out, {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat8E4M3});
  check.shape("out", call.out, {weight.n, weight.k});
  check.aligned16("out", call.out);
  wo::check_apart(check, call.out, w);
  bool const is_float8 = call.out.dtype == DType::kFloat8E4M3;
  if (is_float8 && w.format != WeightFormat::kMxfp4) {
    check.fail("out", "expected float16, bfloat16 or float32 for NVFP4, whose numbers E4M3 cannot represent");
  }
  if (is_float8 != call.row_scale.has_value()) {
    check.fail("row_scale", is_float8 ? "expected float32 [N] with float8, got none" : "expected none without float8");
  }
  if (call.row_scale) {
    check.tensor("row_scale", *call.row_scale, {DType::kFloat32});
    check.vector("row_scale", *call.row_scale, weight.n);
    check.apart("row_scale", *call.row_scale, "out", call.out);
    check.apart("row_scale", *call.row_scale, "weight.q", w.q);
    check.apart("row_scale", *call.row_scale, "weight.scale", w.scale);
  }
  std::int64_t matrices = 1;
  if (call.global_scale) {
    TensorView const& scale = *call.global_scale;
    if (is_float8) check.fail("global_scale", "expected none with float8, got ", describe(scale));
    check.tensor("global_scale", scale, {DType::kFloat32});
    matrices = scale.numel();
    if (matrices < 1 || (matrices > 1 && weight.n % (matrices * wo::kPanelRows) != 0)) {
      check.fail("global_scale", "expected one element, or one for each matrix of a multiple of ", wo::kPanelRows,
                 " rows, got ", describe(scale));
    }
    check.contiguous("global_scale", scale);
    check.apart("out", call.out, "global_scale", scale);
  }
  return {weight,
          w.format,
          call.out.data,
          call.global_scale ? call.global_scale->as<float>() : nullptr,
          std::max<int>(static_cast<int>(weight.n / matrices), 1),
          call.row_scale ? static_cast<float*>(call.row_scale->data) : nullptr};
}

}  // namespace

void check(DequantizeFp4 const& call) { checked(call); }

void dequantize_fp4(DequantizeFp4 const& call, Stream stream) {
  Problem const problem = checked(call);
  expect_device("dequantize_fp4", "out", call.out, Device::Type::kCuda);
  if (problem.weight.n == 0 || problem.weight.k == 0) return;
  ops::dequantize_fp4::launch(problem, call.out.dtype, call.out.device.index, stream);
}

#if !EPILOQ_HAS_CUDA
void ops::dequantize_fp4::launch(Problem const&, DType, int device, Stream) { device_properties(device); }
#endif

}  // namespace epiloq
