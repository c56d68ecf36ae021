#pragma once

// Which architecture's kernels a device runs. Decided here and nowhere else.

#include <optional>

#include "core/target.h"
#include "epiloq/tensor.h"

namespace epiloq {

// Operations with kernels for the same architectures; arch.cpp has a row for each.
enum class KernelSet {
  kInt8Gemm,
  kFloat8Gemm,
  kInt8Groupwise,
  kFloat8Groupwise,
  kWeightOnly,
  kOnlineQuant,
  kConvolution,
  kDecodeAttention
};

// The newest architecture of the set that this build contains, the device runs and epiloq.config allows, if any.
std::optional<Target> find_target(KernelSet set, int device);

// The same; throws Unsupported on behalf of `operation` if there is none.
Target target_of_device(char const* operation, KernelSet set, int device);

// The first card of an architecture, for answers without a device. Throws InvalidArgument if the set is not explained
// for it, Unsupported if it has no kernels of its own.
Target nominal(KernelSet set, Arch arch);

// The same by a device's index, or kNoDevice.
Target target_of_index(char const* operation, KernelSet set, int device);

// The target of a CUDA device; on the CPU, the forced architecture's first card.
Target target_of(char const* operation, KernelSet set, Device device);

}  // namespace epiloq
