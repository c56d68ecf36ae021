#pragma once

#include <string>
#include <vector>

#include "epiloq/export.h"

namespace epiloq {

// The instruction sets that kernels are written for. kAuto is the best one that the device runs.
enum class Arch : int { kAuto = 0, kSm75 = 75, kSm80 = 80, kSm89 = 89, kSm90 = 90, kSm100 = 100 };

EPILOQ_API std::string name(Arch arch);
EPILOQ_API Arch parse_arch(std::string const& name);

struct DeviceProperties {
  int compute_capability = 0;  // 75, 80, 90, ...
  int sm_count = 0;
  int shared_memory_per_block = 0;  // bytes that a CTA may request, opt-in included
  int l2_bytes = 0;
  int memory_gb_s = 0;  // from the memory clock and bus width; 0 if the driver does not report them
};

// Read once per device and cached. Throws Unsupported if this build has no CUDA, CudaError if there is no such device,
// and InvalidArgument for an index outside 0 to 63.
EPILOQ_API DeviceProperties const& device_properties(int device_index);

// The architectures whose kernels this build contains, oldest first. Empty in a CPU build.
EPILOQ_API std::vector<Arch> built_archs();
EPILOQ_API bool is_built(Arch arch);

// Calls of this thread use kernels of `arch` (to test older paths on a newer device); kAuto ends it.
EPILOQ_API void force_arch(Arch arch);
EPILOQ_API Arch forced_arch();

}  // namespace epiloq
