#pragma once

#include <functional>
#include <string>
#include <vector>

#include "epiloq/export.h"

namespace epiloq {

// Kernel choices measured on a device, which dispatch prefers to its own (docs/kernel_choice.md).

struct KernelCandidate {
  std::string name;  // as in `explain`; unique among a problem's candidates
  double us = 0;     // estimated by the cost model; 0: no estimate
};
struct KernelCandidates {
  std::string key;     // the problems that share a tuned choice
  std::string chosen;  // the untuned choice
  std::vector<KernelCandidate> all;
};

// For problems without a device, which a forced architecture decides on the CPU.
inline constexpr int kNoDevice = -1;

// Calls of this thread use the candidate of that name, and throw InvalidArgument if the problem has none of
// that name; "" ends it. For timing candidates.
EPILOQ_API void force_kernel(std::string const& name);

// From now on problems of this key use the candidate of that name on this device; if it is no candidate
// (under a forced architecture, for example), dispatch chooses as if untuned.
EPILOQ_API void set_tuned_kernel(int device, std::string const& key, std::string const& name);
EPILOQ_API void clear_tuned_kernels(int device);

// A digest of this build's kernel sources: tuned choices are valid for one digest.
EPILOQ_API std::string kernel_hash();

// Called with a device's index before its first problem is dispatched, to call set_tuned_kernel. Not called
// for kNoDevice.
EPILOQ_API void on_first_dispatch(std::function<void(int device)> load);

}  // namespace epiloq
