// Linear layers in one call: the checks of a call, the output, a quantiser if there is one, and the product. In eager
// torch, doing these from Python takes several times as long as a small layer's kernels.
//
// Each function returns None where torch has to see the operations (LayerCall), and where other operations are needed:
// padding along N, another output type, a dense product. The layer's `forward` then runs them one by one.
//
// A product behind a quantiser may use constant_b whoever wrote the weight: quantisers call pdl_wait before they
// trigger (kernels/quantize/quantize.cuh). Compiled layers are two operations with the same flag, which holds there
// because the weight is a buffer written by torch.

#include "bindings/layers/layer_call.h"
#include "bindings/register.h"
#include "bindings/scratch.h"
#include "epiloq/batch_invariant.h"
#include "epiloq/device.h"
#include "epiloq/groupwise_mm.h"
#include "epiloq/kernel_archs.h"
#include "epiloq/quantize_fp8.h"
#include "epiloq/quantize_int8.h"
#include "epiloq/scaled_mm.h"

namespace epiloq::bindings {
namespace {

// One operation of a layer, on a stream or, without one, on the CPU.
void launch(QuantizeInt8 const& call, Stream stream) { quantize_int8(call, stream); }
void launch(QuantizeFp8 const& call, Stream stream) { quantize_fp8(call, stream); }
void launch(ScaledMm const& call, auto... stream) { scaled_mm(call, stream...); }
void launch(GroupwiseMm const& call, auto... stream) { groupwise_mm(call, stream...); }

template <class Quantize, class Product>
bool run(LayerCall const& call, Quantize const& quantize, Product product) {
  Stream const stream = current_stream(call.x());
  product.constant_b = true;
  if (call.is_cpu()) {
    product.threads = threads();
    py::gil_scoped_release const released;
    launch(quantize, stream), launch(product);
  } else {
    launch(quantize, stream), launch(product, stream);
  }
  return true;
}

// Whether the call is direct, the bias has x's type, and the weight has no padding rows.
bool suits(LayerCall const& call, Optional const& weight, Optional const& bias, Optional const& scale,
           std::int64_t out_features) {
  if (!call.is_direct() || !weight || !scale || weight->view.rank != 2 || weight->view.shape[0] != out_features)
    return false;
  return !bias || bias->view.dtype == call.x().view.dtype;
}

// The call of a layer whose tokens and weights have a scale per row or one for all; `inputs` receive its other parts,
// in the order of the layer's PARTS.
struct RowScaledLayer {
  RowScaledLayer(py::handle layer, py::handle x, auto*... inputs) : call(layer, x) {
    static Name const out_features("out_features");
    call.read_made({&weight, &bias, &weight_scale, inputs...});
    n = call.number(out_features);
    is_supported = suits(call, weight, bias, weight_scale, n) && (call.is_cpu() ? call.is_float() : call.is_half());
  }

  ScaledMm product(TensorArg const& out, TensorView const& q, TensorView const& scale) const {
    return {rows_of(out.view), q, transposed(weight->view), scale, weight_scale->view, view_of(bias)};
  }

  LayerCall call;
  Optional weight, bias, weight_scale;
  std::int64_t n = 0;
  bool is_supported = false;
};

py::object int8_linear(py::handle layer, py::handle x) {
  Optional azp_adj, input_scale, input_zero_point;
  RowScaledLayer const row_scaled(layer, x, &azp_adj, &input_scale, &input_zero_point);
  if (!row_scaled.is_supported) return py::none();
  LayerCall const& call = row_scaled.call;
  TensorView const tokens = rows_of(call.x().view);
  std::int64_t const m = tokens.shape[0], k = row_scaled.weight->view.shape[1];
  bool const is_static = input_scale.has_value(), measures_azp = azp_adj.has_value() && !is_static;
  return call.output(row_scaled.n, [&](TensorArg const& out) {
    Scratch const scratch(
        call.x(),
        {{DType::kInt8, m, k}, {DType::kFloat32, is_static ? 0 : m, 1}, {DType::kInt32, measures_azp ? m : 0, 1}});
    std::optional<TensorView> const azp = measures_azp ? std::optional(scratch[2]) : std::nullopt;
    QuantizeInt8 const quantize{scratch[0], tokens, is_static ? input_scale->view : scratch[1],
                                is_static ? view_of(input_zero_point) : azp, is_static};
    ScaledMm product = row_scaled.product(out, scratch[0], quantize.scale);
    product.azp_adj = view_of(azp_adj);  // a static zero point is a factor of it
    product.azp = azp;
    return run(call, quantize, product);
  });
}

py::object fp8_linear(py::handle layer, py::handle x) {
  static Name const activation("activation");
  Optional input_scale;
  RowScaledLayer const row_scaled(layer, x, &input_scale);
  if (!row_scaled.is_supported) return py::none();
  LayerCall const& call = row_scaled.call;
  bool const per_token = call.is(activation, "token"), of_all = !per_token && !input_scale;
  if (!multiplies_float8(call.x().view.device) || (of_all && batch_invariant())) return py::none();
  TensorView const tokens = rows_of(call.x().view), &weight = row_scaled.weight->view;
  std::int64_t const m = tokens.shape[0], scales = input_scale ? 0 : per_token ? m : 1;
  return call.output(row_scaled.n, [&](TensorArg const& out) {
    Scratch const scratch(call.x(), {{weight.dtype, m, weight.shape[1]}, {DType::kFloat32, scales, 1}});
    QuantizeFp8 quantize{scratch[0], tokens, input_scale ? input_scale->view : scratch[1]};
    quantize.granularity = per_token ? Granularity::kToken : Granularity::kTensor;
    quantize.is_static = input_scale.has_value();
    return run(call, quantize, row_scaled.product(out, scratch[0], quantize.scale));
  });
}

// Token scales are stored by columns, for TMA.
py::object fp8_block_linear(py::handle layer, py::handle x) {
  constexpr int kGroup = 128, kPitch = 4;
  static Name const out_features("out_features"), rows("rows");
  LayerCall call(layer, x);
  Optional weight, bias, weight_scale_inv;
  call.read_made({&weight, &bias, &weight_scale_inv});
  std::int64_t const n = call.number(out_features);
  if (!suits(call, weight, bias, weight_scale_inv, n) || !call.is_float() || call.number(rows) != kGroup)
    return py::none();
  if (!multiplies_float8(call.x().view.device)) return py::none();
  TensorView const tokens = rows_of(call.x().view);
  TensorView const b = transposed(weight->view), scale_b = transposed(weight_scale_inv->view);
  std::int64_t const m = tokens.shape[0], groups = (tokens.shape[1] + kGroup - 1) / kGroup;
  std::int64_t const pitch = std::max<std::int64_t>((m + kPitch - 1) / kPitch, 1) * kPitch;
  return call.output(n, [&](TensorArg const& out) {
    Scratch const scratch(call.x(), {{b.dtype, m, b.shape[0]}, {DType::kFloat32, groups, pitch}});
    TensorView scale = transposed(scratch[1]);
    scale.shape[0] = m;
    QuantizeFp8 quantize{scratch[0], tokens, scale};
    quantize.granularity = Granularity::kGroup;
    quantize.group_size = kGroup;
    return run(call, quantize, GroupwiseMm{rows_of(out.view), scratch[0], b, scale, scale_b, view_of(bias)});
  });
}

}  // namespace

void register_layers(py::module_& module) {
  auto const define = [&module](char const* name, auto function) {
    module.def(name, function, py::arg("layer"), py::arg("x"));
  };
  define("fp8_block_linear", &fp8_block_linear);
  define("fp8_linear", &fp8_linear);
  define("int8_linear", &int8_linear);
}

}  // namespace epiloq::bindings
