#pragma once

#include <algorithm>
#include <initializer_list>
#include <string>
#include <vector>

#include "bindings/dlpack.h"

namespace epiloq::bindings {

// Temporary tensors for the length of a call, in one allocation from the framework of `like`, on its device. On CUDA
// the framework reuses freed memory on the same stream only. From C++ this takes a fraction of a call from Python.
class Scratch {
 public:
  struct Part {
    DType dtype;
    std::int64_t rows, columns;
  };

  Scratch(TensorArg const& like, std::initializer_list<Part> parts) {
    views_.reserve(parts.size());  // nothing may throw once there is memory
    std::int64_t bytes = 0;
    for (Part const& part : parts) bytes += bytes_of(part);
    char* next = allocate(like, bytes);
    for (Part const& part : parts) {
      views_.push_back(TensorView(next, part.dtype, like.view.device, {part.rows, part.columns}));
      next += bytes_of(part);
    }
  }
  ~Scratch() {
    if (tensor_ != nullptr && tensor_->deleter != nullptr) tensor_->deleter(tensor_);
  }
  Scratch(Scratch const&) = delete;
  Scratch& operator=(Scratch const&) = delete;

  TensorView const& operator[](std::size_t part) const { return views_[part]; }

 private:
  static constexpr std::int64_t kAlignment = 256;

  static std::int64_t bytes_of(Part const& part) {
    std::int64_t const bytes = part.rows * part.columns * size_of(part.dtype);
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  char* allocate(TensorArg const& like, std::int64_t bytes) {
    if (like.api == nullptr) throw InvalidArgument("epiloq: x: expected a tensor of torch");
    DLTensor wanted{};
    bool const is_cuda = like.view.device.type == Device::Type::kCuda;
    wanted.device = {is_cuda ? kDLCUDA : kDLCPU, is_cuda ? like.view.device.index : 0};
    wanted.dtype = {kDLUInt, 8, 1};
    wanted.ndim = 1;
    wanted.shape = &bytes;
    std::string refusal;
    auto const refuse = [](void* to, char const*, char const* message) { *static_cast<std::string*>(to) = message; };
    if (like.api->managed_tensor_allocator(&wanted, &tensor_, &refusal, refuse) != 0) {
      refusal.resize(std::min(refusal.size(), refusal.find("\nException raised from")));  // C++ stack frames follow
      py::object type = py::reinterpret_borrow<py::object>(PyExc_RuntimeError);
      if (is_cuda) type = py::module_::import("torch").attr("OutOfMemoryError");
      PyErr_SetString(type.ptr(), refusal.c_str());
      throw py::error_already_set();
    }
    return static_cast<char*>(tensor_->dl_tensor.data) + tensor_->dl_tensor.byte_offset;
  }

  DLManagedTensorVersioned* tensor_ = nullptr;
  std::vector<TensorView> views_;
};

}  // namespace epiloq::bindings
