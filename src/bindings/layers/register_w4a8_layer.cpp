// Like register_layers.cpp, for layers with 4-bit weights and 8-bit activations: a quantiser, then `weight_only_mm` of
// the converted activations (epiloq.ops.w4a8_mm). At large M Python launches a product of 8-bit operands instead.

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

// Up to these numbers of tokens there is no other product (FLOAT8_TOKENS and _FEW_TOKENS in Python).
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

// Tokens of a call with their scales, or with the one scale of a layer.
struct Tokens {
  TensorView q, scale;
  bool is_static = false;

  void quantise(TensorView const& x, Stream stream) const {
    if (q.dtype == DType::kInt8) return quantize_int8({q, x, scale}, stream);
    QuantizeFp8 call{q, x, scale};
    call.granularity = is_static ? Granularity::kTensor : Granularity::kToken;
    call.is_static = is_static;
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

// Tokens times their scales are rounded to bfloat16, for `multiply(out, tokens, stream)`.
template <class Multiply>
py::object on_cuda(LayerCall const& call, std::int64_t n, DType dtype, Optional const& static_scale,
                   Multiply const& multiply) {
  constexpr std::int64_t kAligned = 8;
  TensorView const x = rows_of(call.x().view);
  std::int64_t const m = x.shape[0], k = x.shape[1];
  return call.output(n, [&](TensorArg const& out) {
    Scratch const scratch(call.x(), {{dtype, m, (k + kMultiple - 1) / kMultiple * kMultiple},
                                     {DType::kFloat32, m, 1},
                                     {DType::kBFloat16, m, (k + kAligned - 1) / kAligned * kAligned}});
    TensorView q = scratch[0], widened = scratch[2];
    q.shape[1] = widened.shape[1] = k;
    TensorView const scale = static_scale ? static_scale->view : scratch[1];
    Stream const stream = current_stream(call.x());
    Tokens{scratch[0], scale, static_scale.has_value()}.quantise(x, stream);
    widen_tokens({widened, q, scale}, stream);
    return multiply(rows_of(out.view), widened, stream);
  });
}

// `weight_only_below`, or 0.
std::int64_t tokens_below(LayerCall& call) {
  static Name const weight_only_below("weight_only_below");
  return call.attribute(weight_only_below) ? call.number(weight_only_below) : 0;
}

// Whether tokens are so few that there is no product of 8 bits, and that a product is not divided.
bool are_few(LayerCall const& call, std::int64_t n, std::int64_t k) {
  std::int64_t const m = rows_of(call.x().view).shape[0];
  return m > 0 && (call.is_cpu() ? m <= kFewOnCpu : m < kManyOnCuda) && m * std::max(n, k) <= kAtOnce;
}

py::object w4a8_linear(py::handle layer, py::handle x) {
  static Name const activation("activation");
  LayerCall call(layer, x);
  Packed const packed(call);
  if (!packed.suits(call) || !(call.is_cpu() ? call.is_float() : call.is_half())) return py::none();
  std::int64_t const below = tokens_below(call);
  if (!call.is_direct() || (below > 0 && batch_invariant())) return py::none();
  if (rows_of(call.x().view).shape[0] < below) return weight_only_product(call, packed);
  if (!are_few(call, packed.weight().n, packed.weight().k)) return py::none();
  DType const dtype = call.is(activation, "int8") ? DType::kInt8 : DType::kFloat8E4M3;
  if (call.is_cpu()) return on_cpu(call, packed, dtype);
  if (call.x().view.dtype != DType::kBFloat16) return py::none();
  return on_cuda(call, packed.weight().n, dtype, std::nullopt,
                 [&](TensorView const& out, TensorView const& tokens, Stream stream) {
                   return weight_only_mm({out, tokens, packed.weight(), packed.bias()}, stream);
                 });
}

// On CUDA; the CPU dequantises a few rows of the weight at a time for torch's product. Python launches products of many
// tokens, and those of activations in groups.
py::object w4a8_fp4_linear(py::handle layer, py::handle x) {
  static Name const activation("activation");
  LayerCall call(layer, x);
  Optional static_scale;
  PackedFp4 const packed(call, &static_scale);
  std::int64_t const below = tokens_below(call);
  if (call.is_cpu() || !packed.suits(call) || (below > 0 && batch_invariant())) return py::none();
  auto const multiply = [&](TensorView const& out, TensorView const& tokens, Stream stream) {
    return grouped_packed_mm(packed.product(out, tokens), stream);
  };
  TensorView const tokens = rows_of(call.x().view);
  if (tokens.shape[0] < below) {
    return call.output(packed.n(), [&](TensorArg const& out) {
      return multiply(rows_of(out.view), tokens, current_stream(call.x()));
    });
  }
  bool const is_in_groups = call.is(activation, "fp8-group");
  if (is_in_groups || !are_few(call, packed.n(), packed.k()) || tokens.dtype != DType::kBFloat16) return py::none();
  DType const dtype = call.is(activation, "int8") ? DType::kInt8 : DType::kFloat8E4M3;
  return on_cuda(call, packed.n(), dtype, static_scale, multiply);
}

}  // namespace

void register_w4a8_layer(py::module_& module) {
  module.def("w4a8_fp4_linear", &w4a8_fp4_linear, py::arg("layer"), py::arg("x"));
  module.def("w4a8_linear", &w4a8_linear, py::arg("layer"), py::arg("x"));
}

}  // namespace epiloq::bindings
