// As register_layers.cpp, of layers with 4-bit weights and 8-bit tokens: a quantiser, then `weight_only_mm` of what the
// tokens became (epiloq.ops.w4a8_mm). Many tokens are products of 8 bits, which Python launches.

#include <bit>
#include <cmath>

#include "bindings/layers/packed.h"
#include "bindings/register.h"
#include "bindings/scratch.h"
#include "core/half.h"
#include "epiloq/batch_invariant.h"
#include "epiloq/quantize_fp8.h"
#include "epiloq/quantize_int8.h"
#include "epiloq/w4a8_mm.h"

namespace epiloq::bindings {
namespace {

// Fewer tokens than these, or as few, have no other product (MANY_TOKENS and _FEW_TOKENS in Python).
constexpr std::int64_t kManyOnCuda = 256, kFewOnCpu = 16;
constexpr std::int64_t kMultiple = 16;  // of the quantised tokens' columns
// Elements of the tokens or of the output at a time (_AT_ONCE in Python).
constexpr std::int64_t kAtOnce = 1 << 24;

std::array<float, 256> const& float8_values() {
  static std::array<float, 256> const values = [] {
    std::array<float, 256> result{};
    for (int code = 0; code < 256; ++code) {
      int const exponent = code >> 3 & 15, mantissa = code & 7;
      float const magnitude = (code & 127) == 127 ? std::nanf("")
                              : exponent == 0     ? std::ldexp(static_cast<float>(mantissa), -9)
                                                  : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
      result[code] = code < 128 ? magnitude : -magnitude;
    }
    return result;
  }();
  return values;
}

// Quantised tokens as float32, which represents them exactly.
void widen(float* to, TensorView const& q, std::int64_t columns) {
  bool const is_int8 = q.dtype == DType::kInt8;
  for (std::int64_t row = 0; row < q.shape[0]; ++row) {
    std::uint8_t const* const from = q.as<std::uint8_t>() + row * q.shape[1];
    for (std::int64_t i = 0; i < columns; ++i, ++to) {
      *to = is_int8 ? static_cast<float>(static_cast<std::int8_t>(from[i])) : float8_values()[from[i]];
    }
  }
}

float bias_at(TensorView const& bias, std::int64_t i) {
  if (bias.dtype == DType::kFloat32) return bias.as<float>()[i * bias.strides[0]];
  std::uint16_t const bits = bias.as<std::uint16_t>()[i * bias.strides[0]];
  return bias.dtype == DType::kFloat16 ? float_of_float16(bits) : float_of_bfloat16(bits);
}

// out = sums scale + bias: the product rounded to fp32 before the sum.
void finish(TensorView const& out, float* sums, float const* scale, std::optional<TensorView> const& bias) {
  std::int64_t const rows = out.shape[0], columns = out.shape[1];
  for (std::int64_t i = 0; i < rows * columns; ++i) sums[i] *= scale[i / columns];
  if (bias) {
    for (std::int64_t i = 0; i < rows * columns; ++i) sums[i] += bias_at(*bias, i % columns);
  }
  for (std::int64_t i = 0; i < rows * columns; ++i) {
    if (out.dtype == DType::kFloat32) out.as<float>()[i] = sums[i];
    if (out.dtype == DType::kFloat16) out.as<std::uint16_t>()[i] = float16_of_float(sums[i]);
    if (out.dtype == DType::kBFloat16) out.as<std::uint16_t>()[i] = bfloat16_of_float(sums[i]);
  }
}

// Tokens of a call with their scales.
struct Tokens {
  TensorView q, scale;

  void quantise(TensorView const& x, Stream stream) const {
    if (q.dtype == DType::kInt8) return quantize_int8({q, x, scale}, stream);
    QuantizeFp8 call{q, x, scale};
    call.granularity = Granularity::kToken;
    quantize_fp8(call, stream);
  }
};

// Sums are in fp32, and multiplied by the tokens' scales after.
py::object on_cpu(LayerCall const& call, Packed const& packed, DType dtype) {
  TensorView const x = rows_of(call.x().view);
  std::int64_t const m = x.shape[0], k = x.shape[1], n = packed.weight().n;
  return call.output(n, [&](TensorArg const& out) {
    Scratch const scratch(call.x(), {{dtype, m, (k + kMultiple - 1) / kMultiple * kMultiple},
                                     {DType::kFloat32, m, 1},
                                     {DType::kFloat32, m, k},
                                     {DType::kFloat32, m, n}});
    Tokens const tokens{scratch[0], scratch[1]};
    WeightOnlyMm product{scratch[3], scratch[2], packed.weight()};
    product.threads = threads();
    std::optional<TensorView> const bias = packed.bias();
    if (bias && (bias->rank != 1 || bias->shape[0] != n || bias->device != out.view.device)) return false;
    py::gil_scoped_release const released;
    tokens.quantise(x, nullptr);
    widen(scratch[2].as<float>(), tokens.q, k);
    if (!weight_only_mm(product, nullptr)) return false;
    finish(rows_of(out.view), scratch[3].as<float>(), tokens.scale.as<float>(), bias);
    return true;
  });
}

// Tokens times their scales are rounded to bfloat16.
py::object on_cuda(LayerCall const& call, Packed const& packed, DType dtype) {
  constexpr std::int64_t kAligned = 8;
  TensorView const x = rows_of(call.x().view);
  std::int64_t const m = x.shape[0], k = x.shape[1], n = packed.weight().n;
  return call.output(n, [&](TensorArg const& out) {
    Scratch const scratch(call.x(), {{dtype, m, (k + kMultiple - 1) / kMultiple * kMultiple},
                                     {DType::kFloat32, m, 1},
                                     {DType::kBFloat16, m, (k + kAligned - 1) / kAligned * kAligned}});
    TensorView q = scratch[0], widened = scratch[2];
    q.shape[1] = widened.shape[1] = k;
    Stream const stream = current_stream(call.x());
    Tokens{scratch[0], scratch[1]}.quantise(x, stream);
    widen_tokens({widened, q, scratch[1]}, stream);
    return weight_only_mm({rows_of(out.view), widened, packed.weight(), packed.bias()}, stream);
  });
}

py::object w4a8_linear(py::handle layer, py::handle x) {
  static Name const activation("activation"), weight_only_below("weight_only_below");
  LayerCall call(layer, x);
  Packed const packed(call);
  if (!packed.suits(call) || !(call.is_cpu() ? call.is_float() : call.is_half())) return py::none();
  TensorView const tokens = rows_of(call.x().view);
  std::int64_t const m = tokens.shape[0],
                     below = call.attribute(weight_only_below) ? call.number(weight_only_below) : 0;
  if (!call.is_direct() || (below > 0 && batch_invariant())) return py::none();
  if (m < below) return weight_only_product(call, packed);
  bool const is_few = call.is_cpu() ? m <= kFewOnCpu : m < kManyOnCuda;
  std::int64_t const width = std::max(packed.weight().n, packed.weight().k);
  if (m == 0 || !is_few || m * width > kAtOnce) return py::none();
  DType const dtype = call.is(activation, "int8") ? DType::kInt8 : DType::kFloat8E4M3;
  if (call.is_cpu()) return on_cpu(call, packed, dtype);
  return call.x().view.dtype == DType::kBFloat16 ? on_cuda(call, packed, dtype) : py::none();
}

}  // namespace

void register_w4a8_layer(py::module_& module) {
  module.def("w4a8_linear", &w4a8_linear, py::arg("layer"), py::arg("x"));
}

}  // namespace epiloq::bindings
