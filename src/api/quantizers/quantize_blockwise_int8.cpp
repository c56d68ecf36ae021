#include "epiloq/quantize_blockwise_int8.h"

#include <algorithm>

#include "core/checks.h"
#include "epiloq/device.h"
#include "problems/quantizers/quantize_blockwise_int8.h"

namespace epiloq {
namespace {

constexpr std::int64_t kMaxSize = (std::int64_t{1} << 31) - 1;
// |q| <= 128: int32 sums hold a block of 2^24 values.
constexpr std::int64_t kMaxGroup = (std::int64_t{1} << 24) - 1;

struct Sizes {
  Matrix x, q;
  std::int64_t blocks;
};

bool same_leading(TensorView const& a, TensorView const& b) {
  return a.rank == b.rank && std::equal(a.shape.begin(), a.shape.begin() + a.rank - 1, b.shape.begin());
}

Sizes checked(QuantizeBlockwiseInt8 const& call) {
  Checker const check("quantize_blockwise_int8", call.x.device);
  check.tensor("x", call.x, kFloats);
  check.tensor("out", call.q, {DType::kInt8});
  std::int64_t const group = call.group_size;
  if (group < 1 || group > kMaxGroup) check.fail("group_size", "expected 1 to ", kMaxGroup, ", got ", group);
  Sizes const sizes{check.rows("x", call.x), check.rows("out", call.q), (call.x.size(-1) + group - 1) / group};
  if (!same_leading(call.x, call.q) || sizes.q.cols != sizes.x.cols) {
    check.fail("out", "expected x's shape, got ", describe(call.q), " for ", describe(call.x));
  }
  if (sizes.x.rows > kMaxSize || sizes.x.cols > kMaxSize - group) {
    check.fail("x", "expected fewer than 2^31 rows and columns, got ", describe(call.x));
  }
  auto const parameter = [&](char const* name, TensorView const& view, DType dtype) {
    check.tensor(name, view, {dtype});
    if (!same_leading(call.x, view) || view.size(-1) != sizes.blocks) {
      check.fail(name, "expected x's leading dimensions and ", sizes.blocks, " blocks, got ", describe(view));
    }
    check.contiguous(name, view);
    check.apart(name, view, "x", call.x);
    check.apart(name, view, "out", call.q);
  };
  parameter("scale", call.scale, DType::kFloat32);
  parameter("sum", call.sum, DType::kInt32);
  check.apart("out", call.q, "x", call.x);
  check.apart("sum", call.sum, "scale", call.scale);
  if (call.offset) {
    parameter("offset", *call.offset, DType::kFloat32);
    check.apart("offset", *call.offset, "scale", call.scale);
    check.apart("offset", *call.offset, "sum", call.sum);
  }
  return sizes;
}

}  // namespace

void check(QuantizeBlockwiseInt8 const& call) { checked(call); }

void quantize_blockwise_int8(QuantizeBlockwiseInt8 const& call, Stream stream) {
  Sizes const sizes = checked(call);
  if (sizes.x.rows == 0 || sizes.x.cols == 0) return;
  ops::quantize_blockwise_int8::Problem problem{};
  problem.rows = static_cast<int>(sizes.x.rows);
  problem.cols = static_cast<int>(sizes.x.cols);
  problem.padded_cols = problem.cols;
  problem.parameter_rows = problem.rows;
  problem.group = static_cast<int>(call.group_size);
  problem.stride_x = sizes.x.stride;
  problem.stride_q = sizes.q.stride;
  problem.row_stride = sizes.blocks;
  problem.block_stride = 1;
  problem.x = call.x.data;
  problem.q = call.q.as<std::int8_t>();
  problem.scale = call.scale.as<float>();
  problem.offset = call.offset ? call.offset->as<float>() : nullptr;
  problem.sum = call.sum.as<std::int32_t>();
  if (call.x.device.type == Device::Type::kCpu) {
    return ops::quantize_blockwise_int8::run_on_host(problem, call.x.dtype);
  }
  ops::quantize_blockwise_int8::launch(problem, call.x.dtype, call.x.device.index, stream);
}

#if !EPILOQ_HAS_CUDA
void ops::quantize_blockwise_int8::launch(Problem const&, DType, int device, Stream) { device_properties(device); }
#endif

}  // namespace epiloq
