// Linear layers in one call: a quantiser and the product that follows. In eager torch, allocating and passing the
// intermediate tensors through Python would take longer than a small layer's kernels.
//
// A product behind a quantiser may use constant_b whoever wrote the weight: quantisers call pdl_wait before they
// trigger (kernels/quantize/quantize.cuh). Compiled layers are two operations with the same flag, which holds there
// because the weight is a buffer written by torch.

#include "bindings/register.h"
#include "bindings/scratch.h"
#include "epiloq/groupwise_mm.h"
#include "epiloq/quantize_fp8.h"
#include "epiloq/quantize_int8.h"
#include "epiloq/scaled_mm.h"

namespace epiloq::bindings {
namespace {

using Optional = std::optional<TensorArg>;

// A dense tensor [.., C] as [R, C].
TensorView rows_of(TensorArg const& argument, char const* name) {
  TensorView const& view = argument.view;
  bool is_dense = view.rank > 0 && view.rank <= TensorView::kMaxRank;
  std::int64_t const count = is_dense ? view.numel() : 0;
  std::int64_t stride = 1;
  for (int i = view.rank - 1; is_dense && count > 0 && i >= 0; stride *= view.shape[i--]) {
    is_dense = view.shape[i] == 1 || view.strides[i] == stride;
  }
  if (!is_dense) {
    throw InvalidArgument("epiloq: " + std::string(name) + ": expected dense memory, got " + describe(view));
  }
  std::int64_t const columns = view.size(-1);
  return {view.data, view.dtype, view.device, {columns > 0 ? count / columns : 0, columns}};
}

// A matrix as an operand of a product.
TensorView operand_of(TensorArg const& argument, char const* name) {
  if (argument.view.rank == 2) return transposed(argument.view);
  throw InvalidArgument("epiloq: " + std::string(name) + ": expected a matrix in memory, got " +
                        describe(argument.view));
}

// quantise(stream), then multiply(stream); without a stream on the CPU.
template <class Quantise, class Multiply>
void run(TensorArg const& x, Quantise const& quantise, Multiply const& multiply) {
  Stream const stream = current_stream(x);
  if (x.view.device.type == Device::Type::kCuda) {
    quantise(stream), multiply(stream);
  } else {
    py::gil_scoped_release const released;
    quantise(stream), multiply();
  }
}

void int8_linear(TensorArg const& out, TensorArg const& x, TensorArg const& weight, Optional const& bias,
                 TensorArg const& weight_scale, Optional const& azp_adj, Optional const& input_scale,
                 Optional const& input_zero_point, int threads) {
  TensorView const tokens = rows_of(x, "x");
  std::int64_t const m = tokens.shape[0];
  bool const is_static = input_scale.has_value(), measures_azp = azp_adj.has_value() && !is_static;
  TensorView const b = operand_of(weight, "weight");
  Scratch const scratch(x, {{DType::kInt8, m, b.shape[0]},
                            {DType::kFloat32, is_static ? 0 : m, 1},
                            {DType::kInt32, measures_azp ? m : 0, 1}});
  std::optional<TensorView> const azp = measures_azp ? std::optional(scratch[2]) : std::nullopt;
  QuantizeInt8 const quantize{scratch[0], tokens, is_static ? input_scale->view : scratch[1],
                              is_static ? view_of(input_zero_point) : azp, is_static};
  // A static zero point is a factor of azp_adj.
  ScaledMm product{rows_of(out, "out"), scratch[0],       b,  quantize.scale, weight_scale.view,
                   view_of(bias),       view_of(azp_adj), azp};
  product.threads = threads;
  product.constant_b = true;
  run(
      x, [&](Stream stream) { quantize_int8(quantize, stream); },
      [&](auto... stream) { scaled_mm(product, stream...); });
}

void fp8_linear(TensorArg const& out, TensorArg const& x, TensorArg const& weight, Optional const& bias,
                TensorArg const& weight_scale, Optional const& input_scale, bool per_token, int threads) {
  TensorView const tokens = rows_of(x, "x");
  std::int64_t const m = tokens.shape[0], scales = input_scale ? 0 : per_token ? m : 1;
  TensorView const b = operand_of(weight, "weight");
  Scratch const scratch(x, {{b.dtype, m, b.shape[0]}, {DType::kFloat32, scales, 1}});
  QuantizeFp8 quantize{scratch[0], tokens, input_scale ? input_scale->view : scratch[1]};
  quantize.granularity = per_token ? Granularity::kToken : Granularity::kTensor;
  quantize.is_static = input_scale.has_value();
  ScaledMm product{rows_of(out, "out"), scratch[0], b, quantize.scale, weight_scale.view, view_of(bias)};
  product.threads = threads;
  product.constant_b = true;
  run(
      x, [&](Stream stream) { quantize_fp8(quantize, stream); },
      [&](auto... stream) { scaled_mm(product, stream...); });
}

// Token scales are stored by columns, for TMA.
void fp8_block_linear(TensorArg const& out, TensorArg const& x, TensorArg const& weight, Optional const& bias,
                      TensorArg const& weight_scale_inv, int threads) {
  constexpr int kGroup = 128, kPitch = 4;
  TensorView const tokens = rows_of(x, "x");
  std::int64_t const m = tokens.shape[0], groups = (tokens.shape[1] + kGroup - 1) / kGroup;
  TensorView const b = operand_of(weight, "weight"), scale_b = operand_of(weight_scale_inv, "weight_scale_inv");
  Scratch const scratch(x, {{b.dtype, m, b.shape[0]},
                            {DType::kFloat32, groups, std::max<std::int64_t>((m + kPitch - 1) / kPitch, 1) * kPitch}});
  TensorView scale = transposed(scratch[1]);
  scale.shape[0] = m;
  QuantizeFp8 quantize{scratch[0], tokens, scale};
  quantize.granularity = Granularity::kGroup;
  quantize.group_size = kGroup;
  GroupwiseMm product{rows_of(out, "out"), scratch[0], b, scale, scale_b, view_of(bias)};
  product.threads = threads;
  product.constant_b = true;
  run(
      x, [&](Stream stream) { quantize_fp8(quantize, stream); },
      [&](auto... stream) { groupwise_mm(product, stream...); });
}

}  // namespace

void register_linear(py::module_& module) {
  module.def("int8_linear", &int8_linear, py::arg("out"), py::arg("x"), py::arg("weight"), py::arg("bias"),
             py::arg("weight_scale"), py::arg("azp_adj"), py::arg("input_scale"), py::arg("input_zero_point"),
             py::arg("threads"));
  module.def("fp8_linear", &fp8_linear, py::arg("out"), py::arg("x"), py::arg("weight"), py::arg("bias"),
             py::arg("weight_scale"), py::arg("input_scale"), py::arg("per_token"), py::arg("threads"));
  module.def("fp8_block_linear", &fp8_block_linear, py::arg("out"), py::arg("x"), py::arg("weight"), py::arg("bias"),
             py::arg("weight_scale_inv"), py::arg("threads"));
}

}  // namespace epiloq::bindings
