#pragma once

// Which architecture's kernels a device runs: asked here and nowhere else.

#include <optional>

#include "core/target.h"
#include "epiloq/tensor.h"

namespace epiloq {

// Operations by the architectures that they have kernels for; arch.cpp has a row for each.
enum class KernelSet {
  kInt8Gemm,
  kFloat8Gemm,
  kInt8Groupwise,
  kFloat8Groupwise,
  kWeightOnly,
  kOnlineQuant,
  kConvolution
};

// The newest architecture of the set that this build has, the device runs and epiloq.config allows; none otherwise.
std::optional<Target> find_target(KernelSet set, int device);

// The same. Throws Unsupported in the name of `operation` where there is none.
Target target_of_device(char const* operation, KernelSet set, int device);

// An architecture's first card, for answers without a device. Throws InvalidArgument for one that the set is never
// explained for, Unsupported for one without kernels of its own.
Target nominal(KernelSet set, Arch arch);

// Of a device; of the CPU, the forced architecture's first card.
Target target_of(char const* operation, KernelSet set, Device device);

}  // namespace epiloq
