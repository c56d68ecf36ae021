#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <string>

#include "epiloq/error.h"

namespace epiloq {

inline void cuda_check(cudaError_t status, char const* doing) {
  if (status != cudaSuccess) {
    throw CudaError(std::string("epiloq: ") + doing + ": " + cudaGetErrorString(status));
  }
}

// Makes a device current for a scope; almost free if it already is.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    cuda_check(cudaGetDevice(&previous_), "asking for the current device");
    // A new thread reports device 0 before it has a context, and the driver encodes TMA descriptors in the current
    // context: a thread's first call therefore sets the device even if it seems to be set.
    thread_local bool has_context = false;
    if (device == previous_ && has_context) {
      previous_ = kNothingToRestore;
      return;
    }
    cuda_check(cudaSetDevice(device), "making the operands' device current");
    has_context = true;
  }
  ~DeviceGuard() {
    if (previous_ != kNothingToRestore) cudaSetDevice(previous_);
  }
  DeviceGuard(DeviceGuard const&) = delete;
  DeviceGuard& operator=(DeviceGuard const&) = delete;

 private:
  static constexpr int kNothingToRestore = -1;
  int previous_ = kNothingToRestore;
};

// What a kernel needs once per device, as attributes belong to the current device. Two threads may both do it, which is
// harmless.
class PerDevice {
 public:
  // Lets `kernel` be launched with up to `bytes` of dynamic shared memory on the current device, which is `device`.
  template <class... Parameters>
  void allow_shared(void (*kernel)(Parameters...), int bytes, int device) {
    std::uint64_t const bit = std::uint64_t{1} << device;
    if (done_.load(std::memory_order_acquire) & bit) return;
    cuda_check(
        cudaFuncSetAttribute(reinterpret_cast<void const*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "asking for shared memory");
    done_.fetch_or(bit, std::memory_order_release);
  }

 private:
  std::atomic<std::uint64_t> done_{0};
};

}  // namespace epiloq
