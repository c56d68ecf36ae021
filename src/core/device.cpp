#include "epiloq/device.h"

#include <array>
#include <mutex>

#include "epiloq/error.h"

#if EPILOQ_HAS_CUDA
#include "core/cuda_check.h"
#endif

namespace epiloq {
namespace {

struct ArchName {
  Arch arch;
  char const* name;
  bool built;
};
// One row an architecture; the build says which are in it.
constexpr ArchName kArchs[] = {
    {Arch::kAuto, "auto", false},           {Arch::kSm75, "sm75", EPILOQ_HAS_SM75},
    {Arch::kSm80, "sm80", EPILOQ_HAS_SM80}, {Arch::kSm89, "sm89", EPILOQ_HAS_SM89},
    {Arch::kSm90, "sm90", EPILOQ_HAS_SM90},
};

thread_local Arch t_forced_arch = Arch::kAuto;

}  // namespace

std::string name(Arch arch) {
  for (auto const& row : kArchs) {
    if (row.arch == arch) return row.name;
  }
  return "unknown";
}

Arch parse_arch(std::string const& text) {
  std::string known;
  for (auto const& row : kArchs) {
    if (text == row.name) return row.arch;
    known += (known.empty() ? "" : ", ") + std::string(row.name);
  }
  throw InvalidArgument("epiloq: arch: expected one of " + known + ", got " + text);
}

std::vector<Arch> built_archs() {
  std::vector<Arch> archs;
  for (auto const& row : kArchs) {
    if (row.built) archs.push_back(row.arch);
  }
  return archs;
}

bool is_built(Arch arch) {
  for (auto const& row : kArchs) {
    if (row.arch == arch) return row.built;
  }
  return false;
}

void force_arch(Arch arch) { t_forced_arch = arch; }
Arch forced_arch() { return t_forced_arch; }

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
  // Two transfers a clock, of kHz.
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
