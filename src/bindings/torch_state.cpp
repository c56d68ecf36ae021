#include "bindings/torch_state.h"

#include <vector>

#include "bindings/register.h"

namespace epiloq::bindings {
namespace {

struct Torch {
  std::vector<py::object> plain;  // types
  py::object strided;
  py::object layout, requires_grad, version, dtype, is_meta, is_nested;  // attributes of tensors, as descriptors
  py::object is_neg;                                                     // a method
  std::vector<py::object> counts;                                        // each 0 if none is active
  std::vector<py::object> optional;                                      // each None if none is active
  py::object grad_enabled, autocast_enabled, num_threads;
  py::object empty_cpu, empty_cuda, cuda_device;  // of memory and strides alone; None where torch has none
  py::dict forward_derivatives, forks;            // of modules
};

Torch* torch = nullptr;  // never freed: the interpreter may be gone before static objects are

py::object called(py::object const& function) {
  PyObject* const result = PyObject_CallNoArgs(function.ptr());
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

bool is_true(py::handle value) {
  int const truth = PyObject_IsTrue(value.ptr());
  if (truth < 0) throw py::error_already_set();
  return truth != 0;
}

py::object read(py::object const& descriptor, py::handle tensor) {
  PyObject* const result =
      Py_TYPE(descriptor.ptr())
          ->tp_descr_get(descriptor.ptr(), tensor.ptr(), reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr())));
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

std::int64_t integer(py::handle value) {
  long long const number = PyLong_AsLongLong(value.ptr());
  if (number == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return number;
}

// A global of a Python module.
py::handle global(py::dict const& module, PyObject* name) {
  PyObject* const value = PyDict_GetItemWithError(module.ptr(), name);
  if (value == nullptr) throw py::error_already_set();
  return value;
}

py::object sizes(std::int64_t const* values, int rank) {
  py::tuple result(rank);
  for (int i = 0; i < rank; ++i) PyTuple_SET_ITEM(result.ptr(), i, PyLong_FromLongLong(values[i]));
  return result;
}

void use_torch(py::dict const& of) {
  auto const listed = [&of](char const* name) {
    std::vector<py::object> result;
    for (py::handle item : of[name]) result.push_back(py::reinterpret_borrow<py::object>(item));
    return result;
  };
  torch = new Torch{listed("plain"),
                    of["strided"],
                    of["layout"],
                    of["requires_grad"],
                    of["version"],
                    of["dtype"],
                    of["is_meta"],
                    of["is_nested"],
                    of["is_neg"],
                    listed("counts"),
                    listed("optional"),
                    of["grad_enabled"],
                    of["autocast_enabled"],
                    of["num_threads"],
                    of["empty_cpu"],
                    of["empty_cuda"],
                    of["cuda_device"],
                    of["forward_derivatives"],
                    of["forks"]};
}

bool is_direct(py::tuple const& required, py::tuple const& optional) {
  for (py::handle tensor : required) {
    if (!is_plain(tensor) || is_nested(tensor)) return false;
  }
  for (py::handle tensor : optional) {
    if (!tensor.is_none() && (!is_plain(tensor) || is_nested(tensor))) return false;
  }
  py::handle const first = PyTuple_GET_ITEM(required.ptr(), 0);
  if (is_true(read(torch->is_meta, first))) return false;
  if (grad_enabled()) {
    for (py::tuple const& tensors : {required, optional}) {
      for (py::handle tensor : tensors) {
        if (!tensor.is_none() && requires_grad(tensor)) return false;
      }
    }
  }
  return !is_watched();
}

}  // namespace

bool is_plain(py::handle tensor) {
  PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr()));
  auto const is_type = [type](py::object const& plain) { return plain.ptr() == type; };
  if (std::none_of(torch->plain.begin(), torch->plain.end(), is_type)) return false;
  if (!read(torch->layout, tensor).is(torch->strided)) return false;
  PyObject* arguments[] = {tensor.ptr()};
  PyObject* const negated = PyObject_Vectorcall(torch->is_neg.ptr(), arguments, 1, nullptr);
  if (negated == nullptr) throw py::error_already_set();
  return !is_true(py::reinterpret_steal<py::object>(negated));
}

bool is_nested(py::handle tensor) { return is_true(read(torch->is_nested, tensor)); }

bool is_watched() {
  static PyObject* const level = PyUnicode_InternFromString("_current_level");
  if (integer(global(torch->forward_derivatives, level)) >= 0) return true;
  for (py::object const& count : torch->counts) {
    if (is_true(called(count))) return true;
  }
  for (py::object const& optional : torch->optional) {
    if (!called(optional).is_none()) return true;
  }
  return false;
}

bool grad_enabled() { return is_true(called(torch->grad_enabled)); }
bool requires_grad(py::handle tensor) { return is_true(read(torch->requires_grad, tensor)); }
bool autocast_enabled() { return is_true(called(torch->autocast_enabled)); }
int threads() { return static_cast<int>(integer(called(torch->num_threads))); }
std::int64_t version_of(py::handle tensor) { return integer(read(torch->version, tensor)); }

bool is_forked() {
  static PyObject* const forked = PyUnicode_InternFromString("forked");
  return is_true(global(torch->forks, forked));
}

py::object new_rows(py::handle x, TensorView const& view, std::int64_t columns) {
  std::array<std::int64_t, TensorView::kMaxRank> shape = view.shape, strides{};
  shape[view.rank - 1] = columns;
  std::int64_t stride = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= std::max<std::int64_t>(shape[i], 1);
  }
  bool const is_cuda = view.device.type == Device::Type::kCuda;
  py::object const& empty = is_cuda ? torch->empty_cuda : torch->empty_cpu;
  py::object const shape_of = sizes(shape.data(), view.rank);
  // torch's function of strides alone takes a third of the time, but on CUDA it knows the current device only.
  bool const is_current =
      !is_cuda || (!torch->cuda_device.is_none() && integer(called(torch->cuda_device)) == view.device.index);
  if (empty.is_none() || !is_current) return x.attr("new_empty")(shape_of);
  py::object const strides_of = sizes(strides.data(), view.rank), dtype = read(torch->dtype, x);
  PyObject* arguments[] = {shape_of.ptr(), strides_of.ptr(), dtype.ptr()};
  PyObject* const result = PyObject_Vectorcall(empty.ptr(), arguments, 3, nullptr);
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

void register_torch_state(py::module_& module) {
  module.def("use_torch", &use_torch, py::arg("of"));
  module.def("is_direct", &is_direct, py::arg("required"), py::arg("optional"));
}

}  // namespace epiloq::bindings
