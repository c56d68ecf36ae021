// Like register_layers.cpp, for layers whose weights the kernels dequantise.

#include "bindings/layers/packed.h"
#include "bindings/ops/online_quant_scratch.h"
#include "bindings/register.h"
#include "epiloq/batch_invariant.h"
#include "epiloq/fp8_weight_mm.h"
#include "epiloq/table_mm.h"

namespace epiloq::bindings {
namespace {

py::object weight_only_linear(py::handle layer, py::handle x) {
  LayerCall call(layer, x);
  Packed const packed(call);
  return packed.suits(call) ? weight_only_product(call, packed) : py::none();
}

py::object online_quant_linear(py::handle layer, py::handle x) {
  static Name const values("weight_q"), biases("bias"), numbers("weight_parameters"), in_features("in_features");
  static Name const out_features("out_features"), bits("bits"), group_size("group_size");
  LayerCall call(layer, x);
  Optional weight, bias, parameters;
  call.read(values, weight), call.read(biases, bias), call.read(numbers, parameters);
  OnlineQuantMm product;
  std::int64_t const n = call.number(out_features);
  product.in_features = call.number(in_features), product.group_size = call.number(group_size);
  product.bits = static_cast<int>(call.number(bits));
  if (!call.is_direct() || !weight || !parameters || (bias && bias->view.dtype != call.x().view.dtype))
    return py::none();
  if (!call.is_cpu() && needs_staging(product.group_size)) return py::none();
  product.x = call.x().view, product.values = weight->view, product.parameters = parameters->view;
  product.bias = view_of(bias);
  return call.output(n, [&](TensorArg const& out) {
    product.out = out.view;
    if (!call.is_cpu()) {
      OnlineQuantScratch const scratch(call.x(), product);
      online_quant_mm(product, scratch.workspace(), current_stream(call.x()));
    } else {
      product.threads = threads();
      py::gil_scoped_release const released;
      online_quant_mm(product);
    }
    return true;
  });
}

// Whether a CUDA kernel may read x.
bool suits_cuda(LayerCall const& call, Optional const& bias) {
  return call.is_direct() && !call.is_cpu() && call.is_half() && suits_kernels(call, bias);
}

py::object fp4_linear(py::handle layer, py::handle x) {
  LayerCall call(layer, x);
  PackedFp4 const packed(call);
  if (!packed.suits(call)) return py::none();
  return call.output(packed.n(), [&](TensorArg const& out) {
    return packed.multiply(rows_of(out.view), rows_of(call.x().view), current_stream(call.x()));
  });
}

// On CUDA; the CPU dequantises a few rows of the weight at a time for torch's product.
py::object fp8_weight_linear(py::handle layer, py::handle x) {
  static Name const out_features("out_features"), block("block");
  LayerCall call(layer, x);
  Optional weight, bias, scale;
  call.read_made({&weight, &bias, &scale});
  std::int64_t const n = call.number(out_features);
  py::handle const sizes = call.attribute(block);
  if (!suits_cuda(call, bias) || !weight || !scale || !sizes || batch_invariant()) return py::none();
  if (weight->view.rank != 2 || weight->view.shape[1] != call.x().view.size(-1)) return py::none();
  auto const [rows, columns] = sizes.cast<std::pair<std::int64_t, std::int64_t>>();
  return call.output(n, [&](TensorArg const& out) {
    Fp8WeightMm const product{out.view, call.x().view, {weight->view, scale->view, rows, columns}, view_of(bias)};
    return fp8_weight_mm(product, current_stream(call.x()));
  });
}

// Likewise.
py::object table_linear(py::handle layer, py::handle x) {
  static Name const out_features("out_features"), in_features("in_features"), block_size("block_size");
  LayerCall call(layer, x);
  Optional codes, bias, table, scale;
  call.read_made({&codes, &bias, &table, &scale});
  std::int64_t const n = call.number(out_features), k = call.number(in_features), block = call.number(block_size);
  if (!suits_cuda(call, bias) || !codes || !table || !scale || batch_invariant()) return py::none();
  return call.output(n, [&](TensorArg const& out) {
    TableMm const product{out.view, call.x().view, {codes->view, table->view, scale->view, n, k, block}, view_of(bias)};
    return table_mm(product, current_stream(call.x()));
  });
}

}  // namespace

void register_packed_layers(py::module_& module) {
  auto const define = [&module](char const* name, auto function) {
    module.def(name, function, py::arg("layer"), py::arg("x"));
  };
  define("fp4_linear", &fp4_linear);
  define("fp8_weight_linear", &fp8_weight_linear);
  define("online_quant_linear", &online_quant_linear);
  define("table_linear", &table_linear);
  define("weight_only_linear", &weight_only_linear);
}

}  // namespace epiloq::bindings
