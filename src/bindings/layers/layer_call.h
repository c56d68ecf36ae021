#pragma once

// A call of a layer in eager torch, without gradients, as one C++ function. The layer's state is read from its
// __dict__ in each call, so that nothing is cached that a later change could leave out of date.

#include <string_view>

#include "bindings/torch_state.h"

namespace epiloq::bindings {

using Optional = std::optional<TensorArg>;

// An attribute's name, interned once.
struct Name {
  explicit Name(char const* text) : object(PyUnicode_InternFromString(text)) {}
  PyObject* object;
};

class LayerCall {
 public:
  LayerCall(py::handle layer, py::handle x);

  // Whether this call may bypass torch: x is dense, plain and […, M, in_features], no mode, transform or autograd of
  // torch is active, and the layer's tensors passed to `read` are plain and need no gradient.
  bool is_direct() const { return is_direct_; }

  // A parameter, or nullopt for None.
  py::object parameter(Name const& name) const;
  void read(Name const& parameter, Optional& to);
  // The tensors derived from the layer's parameters (QuantizedLayer._made), in the order of its PARTS.
  void read_made(std::initializer_list<Optional*> to);
  std::int64_t number(Name const& attribute);
  // Whether an attribute is this string.
  bool is(Name const& attribute, char const* text) const;
  // An attribute, or null if the layer has none of its own.
  py::handle attribute(Name const& name) const;
  void refuse() { is_direct_ = false; }

  TensorArg const& x() const { return x_; }
  py::handle tensor() const { return x_object_; }
  // Replaces x, by a tensor of the same properties.
  void use(py::object x);
  bool is_cpu() const { return x_.view.device.type == Device::Type::kCpu; }
  bool is_half() const { return x_.view.dtype == DType::kFloat16 || x_.view.dtype == DType::kBFloat16; }
  bool is_float() const { return is_half() || x_.view.dtype == DType::kFloat32; }

  // The output […, M, columns], filled by `compute(view, arg)`; None if that returns false.
  template <class Compute>
  py::object output(std::int64_t columns, Compute const& compute) const {
    py::object result = new_rows(x_object_, x_.view, columns);
    TensorArg out;
    if (!lend(result, out) || !compute(out)) return py::none();
    return result;
  }

  static bool lend(py::handle tensor, TensorArg& to);

 private:
  void take(py::handle tensor, Optional& to);

  py::object layer_attributes_;
  py::dict parameters_;
  py::object x_object_;
  TensorArg x_;
  bool is_direct_ = false, grad_enabled_ = false;
  std::array<py::object, 8> held_;  // tensors that are read without the GIL
  std::size_t count_ = 0;
};

// […, C], dense, as [R, C].
TensorView rows_of(TensorView const& dense);

}  // namespace epiloq::bindings
