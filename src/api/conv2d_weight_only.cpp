#include "epiloq/conv2d_weight_only.h"

#include "api/checks/conv2d_geometry.h"
#include "api/checks/packed_weight.h"
#include "core/checks.h"
#include "cpu/w4a16/weight_only.h"
#include "dispatch/arch.h"
#include "dispatch/conv2d_weight_only/launch.h"
#include "epiloq/batch_invariant.h"
#include "epiloq/error.h"

namespace epiloq {
namespace {

namespace conv = ops::conv2d_weight_only;
namespace wo = ops::weight_only_mm;

constexpr std::int64_t kChunk = 8;  // columns per load of a kernel

void check_columns(Checker const& check, PackedConv2dWeight const& w) {
  std::int64_t const cp = w.padded_channels, group = w.rows.group_size;
  bool const pointwise = w.kh == 1 && w.kw == 1;
  if (pointwise ? cp != w.channels : cp < w.channels || cp % kChunk != 0) {
    check.fail("weight.padded_channels", "expected ", w.channels, " of a 1 x 1 kernel, else a multiple of ", kChunk,
               " not below it, got ", cp);
  }
  if (!pointwise && group != -1 && (group < 1 || cp % group != 0)) {
    check.fail("weight.group_size", "expected -1 or a divisor of ", cp, " padded channels, got ", group);
  }
  if (w.rows.k != w.kh * w.kw * cp) {
    check.fail("weight.k", "expected ", w.kh, " x ", w.kw, " x ", cp, " columns, got ", w.rows.k);
  }
}

wo::Weight checked_taps(Checker const& check, PackedConv2dWeight const& w) {
  PackedWeight const& rows = w.rows;
  if (w.channels != 1 || w.padded_channels != 1) {
    check.fail("weight.channels", "expected 1 of a depthwise weight, got ", w.channels);
  }
  if (rows.bits < 2 || rows.bits > 8) check.fail("bits", "expected 2 to 8, got ", rows.bits);
  if (rows.zero && rows.offset) check.fail("offset", "expected none with zero, got ", describe(*rows.offset));
  check.tensor("weight.q", rows.q, {DType::kUInt8});
  check.shape("weight.q", rows.q, {w.kh, w.kw, rows.n});
  auto const parameter = [&](char const* name, TensorView const& view) { check.shape(name, view, {rows.n}); };
  check.tensor("weight.scale", rows.scale, kFloats);
  parameter("weight.scale", rows.scale);
  if (rows.zero) check.tensor("weight.zero", *rows.zero, {DType::kUInt8}), parameter("weight.zero", *rows.zero);
  if (rows.offset) {
    check.tensor("weight.offset", *rows.offset, {rows.scale.dtype});
    parameter("weight.offset", *rows.offset);
  }
  wo::Weight weight{};
  weight.n = static_cast<int>(rows.n);
  weight.k = static_cast<int>(w.kh * w.kw);
  weight.bits = rows.bits;
  weight.q = rows.q.as<std::uint8_t>();
  weight.scale = rows.scale.data;
  weight.zero = rows.zero ? rows.zero->as<std::uint8_t>() : nullptr;
  weight.offset = rows.offset ? rows.offset->data : nullptr;
  weight.scale_dtype = rows.scale.dtype;
  return weight;
}

wo::Weight checked_weight(Checker const& check, PackedConv2dWeight const& w) {
  if (w.depthwise) return checked_taps(check, w);
  check_columns(check, w);
  return wo::checked_weight(check, w.rows);
}

conv::Problem checked(Conv2dWeightOnly const& call) {
  Checker const check("conv2d_weight_only", call.x.device);
  check.tensor("x", call.x, kFloats);
  check.tensor("out", call.out, {call.x.dtype});
  PackedConv2dWeight const& w = call.weight;
  ops::conv2d::Shape const shape =
      ops::conv2d::checked_shape(check, call.out, call.x, {w.rows.n, w.kh, w.kw, w.channels}, call.geometry);
  wo::Weight const weight = checked_weight(check, w);
  check.bias(call.bias, call.out, w.rows.n);
  check.clamp(call.lo, call.hi);
  check.apart("out", call.out, "x", call.x);
  wo::check_apart(check, call.out, w.rows);
  return {shape,
          w.depthwise,
          static_cast<int>(w.channels),
          static_cast<int>(w.padded_channels),
          weight,
          call.x.data,
          call.out.data,
          call.bias ? call.bias->data : nullptr,
          call.x.dtype,
          call.lo,
          call.hi};
}

bool is_empty(conv::Problem const& p) { return p.shape.batch == 0 || p.shape.co == 0; }

conv::Choice choice_of(conv::Problem const& problem, Conv2dWeightOnly const& call) {
  Target const target = target_of("conv2d_weight_only", KernelSet::kConvolution, call.x.device);
  return call.kernel ? conv::choose(problem, target, *call.kernel) : conv::choose(problem, target);
}

void refuse_batch_invariance() {
  if (!batch_invariant()) return;
  throw Unsupported(
      "epiloq.conv2d_weight_only: batch_invariant: its kernels are chosen by the number of pixels, which "
      "changes the order of sums");
}

// A 1 x 1 kernel with unit strides: a product of the weight with the pixels.
std::optional<WeightOnlyMm> product_of(Conv2dWeightOnly const& call) {
  Conv2dGeometry const& g = call.geometry;
  bool const one_tap =
      !call.kernel && !call.weight.depthwise && call.weight.kh == 1 && call.weight.kw == 1 && g.groups == 1;
  if (!one_tap || g.stride != std::array<std::int64_t, 2>{1, 1} || g.padding != std::array<std::int64_t, 4>{})
    return {};
  // On the CPU oneDNN is faster for many pixels, dequantising included.
  std::int64_t const pixels = call.x.size(0) * call.x.size(1) * call.x.size(2);
  if (call.x.device.type == Device::Type::kCpu && forced_arch() == Arch::kAuto && pixels > wo::kSmallM) return {};
  WeightOnlyMm product{call.out, call.x, call.weight.rows, call.bias, call.lo, call.hi};
  product.threads = call.threads;
  return product;
}

}  // namespace

void check(Conv2dWeightOnly const& call) { checked(call); }

bool conv2d_weight_only(Conv2dWeightOnly const& call, Stream stream) {
  conv::Problem const problem = checked(call);
  if (is_empty(problem)) return true;
  refuse_batch_invariance();
  if (auto const product = product_of(call)) return weight_only_mm(*product, stream);
  if (call.x.device.type == Device::Type::kCpu) return false;
  conv::Choice const choice = choice_of(problem, call);
  if (choice.family == conv::Family::kDense) return false;
  conv::launch(choice, problem, call.x.device.index, stream);
  return true;
}

std::string explain(Conv2dWeightOnly const& call) {
  conv::Problem const problem = checked(call);
  if (is_empty(problem)) return "nothing to launch: the output is empty";
  refuse_batch_invariance();
  if (auto const product = product_of(call)) return "the pixels as rows of a product: " + explain(*product);
  bool const on_cpu = call.x.device.type == Device::Type::kCpu && forced_arch() == Arch::kAuto;
  if (on_cpu) return "cpu, dequantised, then a convolution (oneDNN) in fp32";
  return conv::describe(choice_of(problem, call));
}

}  // namespace epiloq
