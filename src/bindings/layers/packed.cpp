#include "bindings/layers/packed.h"

namespace epiloq::bindings {
namespace {

// x with its columns in a weight's order; refused unless the order is one of all columns.
void put_in_order(LayerCall& call, Name const& name, Optional const& perm) {
  TensorView const &order = perm->view, &x = call.x().view;
  bool const fits = order.rank == 1 && order.shape[0] == x.size(-1) && order.device == x.device &&
                    (order.dtype == DType::kInt64 || order.dtype == DType::kInt32);
  if (!fits) return call.refuse();
  call.use(call.tensor().attr("index_select")(-1, call.parameter(name)));
}

}  // namespace

Packed::Packed(LayerCall& call) {
  static Name const q_name("weight_q"), bias_name("bias"), scale_name("weight_scale"), zero_name("weight_zero"),
      offset_name("weight_offset"), perm_name("weight_perm");
  static Name const out_features("out_features"), in_features("in_features"), bits("bits"), group_size("group_size");
  Optional q, scale, zero, offset, perm;
  call.read(q_name, q), call.read(bias_name, bias_), call.read(scale_name, scale);
  call.read(zero_name, zero), call.read(offset_name, offset), call.read(perm_name, perm);
  if (!q || !scale) {
    call.refuse();
    return;
  }
  weight_.q = q->view, weight_.scale = scale->view, weight_.zero = view_of(zero), weight_.offset = view_of(offset);
  weight_.bits = static_cast<int>(call.number(bits));
  weight_.n = call.number(out_features), weight_.k = call.number(in_features);
  weight_.group_size = call.number(group_size);
  if (call.is_direct() && perm) put_in_order(call, perm_name, perm);
}

bool Packed::suits(LayerCall const& call) const { return call.is_direct() && suits_kernels(call, bias_); }

PackedFp4::PackedFp4(LayerCall& call, Optional* static_scale) {
  static Name const out_features("out_features"), in_features("in_features"), format("format");
  if (static_scale != nullptr) {
    call.read_made({&q_, &bias_, &scale_, &factor_, static_scale});
  } else {
    call.read_made({&q_, &bias_, &scale_, &factor_});
  }
  weight_.bits = 4, weight_.n = call.number(out_features), weight_.k = call.number(in_features);
  bool const is_nvfp4 = call.is(format, "nvfp4");
  weight_.group_size = is_nvfp4 ? 16 : 32;
  weight_.format = is_nvfp4 ? WeightFormat::kNvfp4 : WeightFormat::kMxfp4;
  if (q_ && scale_) weight_.q = q_->view, weight_.scale = scale_->view;
}

bool PackedFp4::suits(LayerCall const& call) const {
  bool const has_type = call.is_cpu() ? call.is_float() : call.is_half();
  return call.is_direct() && has_type && suits_kernels(call, bias_) && q_ && scale_ && call.x().view.numel() > 0;
}

GroupedPackedMm PackedFp4::product(TensorView const& out, TensorView const& tokens) const {
  GroupedPackedMm product{out, tokens, weight_};
  if (bias_) product.bias = TensorView(bias_->view.data, bias_->view.dtype, bias_->view.device, {1, n()});
  product.factor = view_of(factor_);
  return product;
}

bool suits_kernels(LayerCall const& call, Optional const& bias) {
  TensorView const& x = call.x().view;
  if (bias && bias->view.dtype != x.dtype) return false;
  bool const on_16_bytes =
      x.size(-1) * size_of(x.dtype) % 16 == 0 && reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0;
  return call.is_cpu() || on_16_bytes;
}

py::object weight_only_product(LayerCall const& call, Packed const& packed) {
  return call.output(packed.weight().n, [&](TensorArg const& out) {
    WeightOnlyMm product{out.view, call.x().view, packed.weight(), packed.bias()};
    Stream const stream = current_stream(call.x());
    std::optional<py::gil_scoped_release> released;
    if (call.is_cpu()) {
      product.threads = threads();
      released.emplace();
    }
    return weight_only_mm(product, stream);
  });
}

}  // namespace epiloq::bindings
