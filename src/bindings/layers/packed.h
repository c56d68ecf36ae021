#pragma once

#include "bindings/layers/layer_call.h"
#include "epiloq/grouped_packed_mm.h"
#include "epiloq/weight_only_mm.h"

namespace epiloq::bindings {

// The tensors and sizes of a PackedLinear. x is put in the weight's order of columns.
class Packed {
 public:
  explicit Packed(LayerCall& call);

  // Whether C++ suffices: the call is direct, and x of the bias's type and, on CUDA, in rows of 16 bytes.
  bool suits(LayerCall const& call) const;

  PackedWeight const& weight() const { return weight_; }
  std::optional<TensorView> bias() const { return view_of(bias_); }

 private:
  Optional bias_;
  PackedWeight weight_;
};

// The tensors and sizes of a layer with FP4 weights.
class PackedFp4 {
 public:
  // `static_scale`: receives the scale of activations that layers with quantised ones may have.
  explicit PackedFp4(LayerCall& call, Optional* static_scale = nullptr);

  // Whether C++ suffices: the call is direct, of at least one token, which on CUDA has 16 bits, and `suits_kernels`
  // holds.
  bool suits(LayerCall const& call) const;

  std::int64_t n() const { return weight_.n; }
  std::int64_t k() const { return weight_.k; }

  // out = tokens W^T + bias, [M, N] and [M, K].
  GroupedPackedMm product(TensorView const& out, TensorView const& tokens) const;

 private:
  Optional q_, bias_, scale_, factor_;
  PackedWeight weight_;
};

// x W^T + bias; None if the weight should be dequantised for a dense product.
py::object weight_only_product(LayerCall const& call, Packed const& packed);

// Whether rows are as wide as kernels load them on CUDA, and x has the bias's type.
bool suits_kernels(LayerCall const& call, Optional const& bias);

}  // namespace epiloq::bindings
