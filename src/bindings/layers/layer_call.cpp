#include "bindings/layers/layer_call.h"

#include "bindings/register.h"

namespace epiloq::bindings {
namespace {

bool is_contiguous(TensorView const& view) {
  std::int64_t stride = 1;
  for (int i = view.rank - 1; i >= 0; stride *= view.shape[i--]) {
    if (view.shape[i] == 0) return true;
    if (view.shape[i] != 1 && view.strides[i] != stride) return false;
  }
  return true;
}

// Borrowed; null where the dictionary has no such key.
PyObject* item(py::handle dictionary, PyObject* key) {
  PyObject* const value = PyDict_GetItemWithError(dictionary.ptr(), key);
  if (value == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return value;
}

// Whether each parameter is the same tensor as in `sources`, (name, tensor, version) of each, and has its version.
bool are_unchanged(py::handle parameters, py::handle sources) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(sources.ptr()); ++i) {
    PyObject* const source = PyTuple_GET_ITEM(sources.ptr(), i);
    PyObject* const held = item(parameters, PyTuple_GET_ITEM(source, 0));
    PyObject *const tensor = PyTuple_GET_ITEM(source, 1), *const version = PyTuple_GET_ITEM(source, 2);
    if ((held == nullptr ? Py_None : held) != tensor) return false;
    if (version != Py_None && PyLong_AsLongLong(version) != version_of(tensor)) return false;
  }
  return true;
}

}  // namespace

LayerCall::LayerCall(py::handle layer, py::handle x) : x_object_(py::reinterpret_borrow<py::object>(x)) {
  static Name const parameters("_parameters"), in_features("in_features");
  layer_attributes_ = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(layer.ptr(), nullptr));
  if (!layer_attributes_) throw py::error_already_set();
  py::handle const held = attribute(parameters);
  if (!held || !PyDict_Check(held.ptr())) return;
  parameters_ = py::reinterpret_borrow<py::dict>(held);
  if (is_forked() || autocast_enabled() || !is_plain(x) || is_nested(x) || !lend(x, x_)) return;
  TensorView const& view = x_.view;
  if (view.rank < 2 || view.rank > TensorView::kMaxRank || view.size(-1) != number(in_features)) return;
  if (view.stride(-1) != 1 || !is_contiguous(view)) return;
  grad_enabled_ = grad_enabled();
  is_direct_ = !(grad_enabled_ && requires_grad(x)) && !is_watched();
}

void LayerCall::read(Name const& parameter, Optional& to) {
  PyObject* const tensor = item(parameters_, parameter.object);
  if (tensor == nullptr) {  // no parameter any more
    is_direct_ = false;
  } else {
    take(tensor, to);
  }
}

void LayerCall::read_made(std::initializer_list<Optional*> to) {
  static Name const held("_held");
  py::handle const made = attribute(held);
  if (!is_direct_ || !made || !PyTuple_Check(made.ptr()) ||
      !are_unchanged(parameters_, PyTuple_GET_ITEM(made.ptr(), 0)))
    return refuse();
  PyObject* const value = PyTuple_GET_ITEM(made.ptr(), 1);
  if (!PyTuple_Check(value) || PyTuple_GET_SIZE(value) != static_cast<Py_ssize_t>(to.size())) return refuse();
  Py_ssize_t i = 0;
  for (Optional* part : to) take(PyTuple_GET_ITEM(value, i++), *part);
}

void LayerCall::take(py::handle tensor, Optional& to) {
  to.reset();
  if (!is_direct_ || tensor.is_none()) return;
  TensorArg argument;
  if (!is_plain(tensor) || (grad_enabled_ && requires_grad(tensor)) || !lend(tensor, argument)) return refuse();
  held_.at(count_++) = py::reinterpret_borrow<py::object>(tensor);
  to = argument;
}

bool LayerCall::lend(py::handle tensor, TensorArg& to) {
  to.api = exchange_api(Py_TYPE(tensor.ptr()));
  DLTensor lent;
  if (to.api == nullptr || to.api->dltensor_from_py_object_no_sync(tensor.ptr(), &lent) != 0) {
    PyErr_Clear();  // on the meta device, for one
    return false;
  }
  to.view = view_of(lent);
  return true;
}

py::object LayerCall::parameter(Name const& name) const {
  return py::reinterpret_borrow<py::object>(item(parameters_, name.object));
}

py::handle LayerCall::attribute(Name const& name) const { return item(layer_attributes_, name.object); }

std::int64_t LayerCall::number(Name const& name) {
  py::handle const value = attribute(name);
  if (value && PyLong_Check(value.ptr())) return PyLong_AsLongLong(value.ptr());
  is_direct_ = false;
  return -1;
}

bool LayerCall::is(Name const& name, char const* text) const {
  py::handle const value = attribute(name);
  return value && PyUnicode_Check(value.ptr()) && PyUnicode_CompareWithASCIIString(value.ptr(), text) == 0;
}

void LayerCall::use(py::object x) {
  x_object_ = std::move(x);
  if (!lend(x_object_, x_)) is_direct_ = false;
}

TensorView rows_of(TensorView const& dense) {
  std::int64_t const columns = dense.size(-1);
  return {dense.data, dense.dtype, dense.device, {columns > 0 ? dense.numel() / columns : 0, columns}};
}

void register_layer_call(py::module_& module) {
  module.def(
      "are_unchanged",
      [](py::dict const& parameters, py::tuple const& sources) { return are_unchanged(parameters, sources); },
      py::arg("parameters"), py::arg("sources"));
}

}  // namespace epiloq::bindings
