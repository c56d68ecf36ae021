#include "epiloq/device.h"

#include <array>
#include <mutex>

#include "epiloq/error.h"

#if EPILOQ_HAS_CUDA
#include "core/cuda_check.h"
#endif

namespace epiloq {

#if EPILOQ_HAS_CUDA
namespace {

DeviceProperties query(int device) {
  DeviceProperties properties;
  auto attribute = [device](cudaDeviceAttr which) {
    int value = 0;
    cuda_check(cudaDeviceGetAttribute(&value, which, device), "reading the properties of a device");
    return value;
  };
  properties.compute_capability =
      10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor);
  properties.sm_count = attribute(cudaDevAttrMultiProcessorCount);
  properties.shared_memory_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  properties.l2_bytes = attribute(cudaDevAttrL2CacheSize);
  // Two transfers per clock, in kHz.
  properties.memory_gb_s = static_cast<int>(std::int64_t{2} * attribute(cudaDevAttrMemoryClockRate) *
                                            attribute(cudaDevAttrGlobalMemoryBusWidth) / 8 / 1'000'000);
  return properties;
}

}  // namespace

DeviceProperties const& device_properties(int device_index) {
  constexpr int kMaxDevices = 64;
  static std::array<DeviceProperties, kMaxDevices> cache;
  static std::array<std::once_flag, kMaxDevices> filled;
  if (device_index < 0 || device_index >= kMaxDevices) {
    throw InvalidArgument("epiloq.device_properties: device_index: expected 0 to 63, got " +
                          std::to_string(device_index));
  }
  std::call_once(filled[device_index], [&] { cache[device_index] = query(device_index); });
  return cache[device_index];
}
#else
DeviceProperties const& device_properties(int) {
  throw Unsupported("epiloq: this build has no CUDA kernels (EPILOQ_CUDA=OFF)");
}
#endif

}  // namespace epiloq
