#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

#include "epiloq/export.h"

struct CUstream_st;

namespace epiloq {

// A CUDA stream, without CUDA's headers: the same type as cudaStream_t and CUstream.
using Stream = CUstream_st*;

// Packed weights are kUInt8. Some of these types no operation takes: a view can hold them so that an error can
// name them.
enum class DType : std::uint8_t {
  kInt8,
  kInt32,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat8E4M3,  // e4m3fn: no infinities, largest 448
  kFloat8E5M2,
  kBool,
  kUInt8,
  kInt16,
  kInt64,
  kFloat64,
  kOther
};

EPILOQ_API char const* name(DType dtype);
EPILOQ_API DType parse_dtype(std::string const& name);
constexpr int size_of(DType dtype) {
  constexpr int kBytes[] = {1, 4, 2, 2, 4, 1, 1, 1, 1, 2, 8, 8, 1};
  return kBytes[static_cast<int>(dtype)];
}

struct Device {
  enum class Type : std::uint8_t { kCpu, kCuda, kOther };
  Type type = Type::kCpu;
  int index = 0;
  friend bool operator==(Device, Device) = default;
};

// A strided view of memory owned by the caller. Sizes and strides count elements. int8 and float8 operands, their
// outputs, packed weights and workspaces must be 16-byte aligned, also on a CPU. A rank above kMaxRank can be given,
// with the first kMaxRank sizes; every operation refuses it.
struct TensorView {
  static constexpr int kMaxRank = 6;

  void* data = nullptr;
  DType dtype = DType::kFloat32;
  Device device;
  int rank = 0;
  std::array<std::int64_t, kMaxRank> shape{};
  std::array<std::int64_t, kMaxRank> strides{};

  TensorView() = default;
  // Row-major and dense, at most kMaxRank sizes.
  TensorView(void* data_, DType dtype_, Device device_, std::initializer_list<std::int64_t> shape_)
      : data(data_), dtype(dtype_), device(device_) {
    for (std::int64_t size : shape_) shape.at(rank++) = size;
    std::int64_t stride = 1;
    for (int i = rank - 1; i >= 0; --i) {
      strides[i] = stride;
      stride *= shape[i];
    }
  }

  // Negative indices count from the last dimension.
  std::int64_t size(int i) const { return shape[i < 0 ? rank + i : i]; }
  std::int64_t stride(int i) const { return strides[i < 0 ? rank + i : i]; }
  std::int64_t numel() const {
    std::int64_t count = 1;
    for (int i = 0; i < rank; ++i) count *= shape[i];
    return count;
  }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

// "int8 [17, 576] on cuda:0", for messages.
EPILOQ_API std::string describe(TensorView const& tensor);

// The same memory with its last two dimensions, of two or more, exchanged: a weight [N, K] as the operand [K, N].
inline TensorView transposed(TensorView view) {
  std::swap(view.shape[view.rank - 1], view.shape[view.rank - 2]);
  std::swap(view.strides[view.rank - 1], view.strides[view.rank - 2]);
  return view;
}

}  // namespace epiloq
