#pragma once

#include "epiloq/device.h"
#include "epiloq/export.h"
#include "epiloq/tensor.h"

namespace epiloq {

// Whether a CUDA device runs this build's kernels of an architecture, and no other is forced. Newer devices run older
// architectures' kernels, but not WGMMA, which only compute capability 9.0 has.
EPILOQ_API bool runs_kernels_of(Arch arch, int device);

// Whether a device multiplies float8 activations: the CPU, and a CUDA device that has a kernel for it.
EPILOQ_API bool multiplies_float8(Device device);

}  // namespace epiloq
