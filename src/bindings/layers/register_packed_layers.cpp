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

// Whether a kernel may read x: of 16 bits, or on the CPU any floating-point type.
bool suits(LayerCall const& call, Optional const& bias) {
  return call.is_direct() && (call.is_cpu() ? call.is_float() : call.is_half()) && suits_kernels(call, bias);
}

// Whether `multiply`, an operation of both devices, computed the product.
template <class Product>
bool is_done(LayerCall const& call, Product const& product, bool (*multiply)(Product const&, Stream)) {
  bool done = false;
  run_with_threads(product, call.x(), [&](Product const& here, Stream stream) { done = multiply(here, stream); });
  return done;
}

py::object fp4_linear(py::handle layer, py::handle x) {
  LayerCall call(layer, x);
  PackedFp4 const packed(call);
  if (!packed.suits(call)) return py::none();
  return call.output(packed.n(), [&](TensorArg const& out) {
    GroupedPackedMm const product = packed.product(rows_of(out.view), rows_of(call.x().view));
    return is_done(call, product, &grouped_packed_mm);
  });
}

py::object fp8_weight_linear(py::handle layer, py::handle x) {
  static Name const out_features("out_features"), block("block");
  LayerCall call(layer, x);
  Optional weight, bias, scale;
  call.read_made({&weight, &bias, &scale});
  std::int64_t const n = call.number(out_features);
  py::handle const sizes = call.attribute(block);
  if (!suits(call, bias) || !weight || !scale || !sizes || batch_invariant()) return py::none();
  TensorView const& q = weight->view;
  if (q.rank != 2 || q.shape[0] != n || q.shape[1] != call.x().view.size(-1)) return py::none();
  auto const [rows, columns] = sizes.cast<std::pair<std::int64_t, std::int64_t>>();
  return call.output(n, [&](TensorArg const& out) {
    Fp8WeightMm const product{out.view, call.x().view, {q, scale->view, rows, columns}, view_of(bias)};
    return is_done(call, product, &fp8_weight_mm);
  });
}

py::object table_linear(py::handle layer, py::handle x) {
  static Name const out_features("out_features"), in_features("in_features"), block_size("block_size");
  LayerCall call(layer, x);
  Optional codes, bias, table, scale;
  call.read_made({&codes, &bias, &table, &scale});
  std::int64_t const n = call.number(out_features), k = call.number(in_features), block = call.number(block_size);
  if (!suits(call, bias) || !codes || !table || !scale || batch_invariant()) return py::none();
  return call.output(n, [&](TensorArg const& out) {
    TableMm const product{out.view, call.x().view, {codes->view, table->view, scale->view, n, k, block}, view_of(bias)};
    return is_done(call, product, &table_mm);
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
