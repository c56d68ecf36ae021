#pragma once

// Tensors cross into C++ through DLPack: torch's C exchange API (torch >= 2.10) lends a DLTensor in some tens of
// nanoseconds; other objects with __dlpack__ (NumPy, CuPy, JAX) pass a capsule.

#include <dlpack/dlpack.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <optional>

#include "epiloq/error.h"
#include "epiloq/tensor.h"

namespace epiloq::bindings {

namespace py = pybind11;

struct TensorArg {
  TensorView view;
  DLPackExchangeAPI const* api = nullptr;
  py::object capsule;  // keeps the memory of the capsule path alive for the call
};

// Types that the library does not know become kOther: the operation's checks, which know the argument, reject it.
inline DType dtype_of(DLDataType type) {
  struct Row {
    DLDataType dl;
    DType dtype;
  };
  constexpr Row kRows[] = {{{kDLInt, 8, 1}, DType::kInt8},
                           {{kDLInt, 32, 1}, DType::kInt32},
                           {{kDLFloat, 16, 1}, DType::kFloat16},
                           {{kDLBfloat, 16, 1}, DType::kBFloat16},
                           {{kDLFloat, 32, 1}, DType::kFloat32},
                           {{kDLFloat8_e4m3fn, 8, 1}, DType::kFloat8E4M3},
                           {{kDLFloat8_e5m2, 8, 1}, DType::kFloat8E5M2},
                           {{kDLBool, 8, 1}, DType::kBool},
                           {{kDLUInt, 8, 1}, DType::kUInt8},
                           {{kDLInt, 16, 1}, DType::kInt16},
                           {{kDLInt, 64, 1}, DType::kInt64},
                           {{kDLFloat, 64, 1}, DType::kFloat64}};
  for (Row const& row : kRows) {
    if (row.dl.code == type.code && row.dl.bits == type.bits && row.dl.lanes == type.lanes) return row.dtype;
  }
  return DType::kOther;
}

inline Device device_of(DLDevice device) {
  switch (device.device_type) {
    case kDLCPU:
    case kDLCUDAHost:
      return {Device::Type::kCpu, 0};
    case kDLCUDA:
    case kDLCUDAManaged:
      return {Device::Type::kCuda, device.device_id};
    default:
      return {Device::Type::kOther, device.device_id};
  }
}

inline TensorView view_of(DLTensor const& tensor) {
  TensorView view;
  view.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  view.dtype = dtype_of(tensor.dtype);
  view.device = device_of(tensor.device);
  view.rank = tensor.ndim;
  std::int64_t dense = 1;
  for (int i = std::min(tensor.ndim, TensorView::kMaxRank) - 1; i >= 0; --i) {
    view.shape[i] = tensor.shape[i];
    view.strides[i] = tensor.strides != nullptr ? tensor.strides[i] : dense;
    dense *= tensor.shape[i];
  }
  return view;
}

// Meta and sparse tensors have no memory.
inline TensorView view_of_nothing() {
  PyErr_Clear();
  TensorView view;
  view.device.type = Device::Type::kOther;
  return view;
}

// The exchange table of an object's type, cached for the few types that a program uses. Requires the GIL.
inline DLPackExchangeAPI const* exchange_api(PyTypeObject* type) {
  struct Entry {
    PyTypeObject* type;
    DLPackExchangeAPI const* api;
  };
  static std::array<Entry, 4> cache{};
  static std::size_t next = 0;
  for (Entry const& entry : cache) {
    if (entry.type == type) return entry.api;
  }
  DLPackExchangeAPI const* api = nullptr;
  auto const capsule = py::reinterpret_steal<py::object>(
      PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__"));
  if (!capsule) {
    PyErr_Clear();
  } else {
    auto const* found =
        static_cast<DLPackExchangeAPI const*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (found == nullptr) throw py::error_already_set();
    if (found->header.version.major == DLPACK_MAJOR_VERSION) api = found;
  }
  Py_INCREF(type);  // a cached address must remain this type's
  cache[next++ % cache.size()] = {type, api};
  return api;
}

inline void load_capsule(py::handle source, TensorArg& value) {
  auto const device = source.attr("__dlpack_device__")().cast<std::pair<int, int>>();
  constexpr int kLegacyDefaultStream = 1;
  value.capsule = device.first == kDLCUDA ? source.attr("__dlpack__")(py::arg("stream") = kLegacyDefaultStream)
                                          : source.attr("__dlpack__")();
  auto* const managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(value.capsule.ptr(), "dltensor"));
  if (managed == nullptr) throw py::error_already_set();
  value.view = view_of(managed->dl_tensor);
}

// The current stream of the caller's framework; on the capsule path the legacy default stream.
inline Stream current_stream(TensorArg const& argument) {
  void* stream = nullptr;
  if (argument.api != nullptr && argument.view.device.type == Device::Type::kCuda) {
    if (argument.api->current_work_stream(kDLCUDA, argument.view.device.index, &stream) != 0) {
      throw py::error_already_set();
    }
  }
  return static_cast<Stream>(stream);
}

inline std::optional<TensorView> view_of(std::optional<TensorArg> const& argument) {
  if (!argument) return std::nullopt;
  return argument->view;
}

}  // namespace epiloq::bindings

namespace pybind11::detail {
template <>
struct type_caster<epiloq::bindings::TensorArg> {
  PYBIND11_TYPE_CASTER(epiloq::bindings::TensorArg, const_name("Tensor"));

  bool load(handle source, bool) {
    value.api = epiloq::bindings::exchange_api(Py_TYPE(source.ptr()));
    if (value.api != nullptr) {
      DLTensor tensor;
      bool const lent = value.api->dltensor_from_py_object_no_sync(source.ptr(), &tensor) == 0;
      value.view = lent ? epiloq::bindings::view_of(tensor) : epiloq::bindings::view_of_nothing();
      return true;
    }
    if (!hasattr(source, "__dlpack__")) return false;
    epiloq::bindings::load_capsule(source, value);
    return true;
  }
};
}  // namespace pybind11::detail
