#pragma once

#include <functional>
#include <string>
#include <vector>

#include "epiloq/export.h"

namespace epiloq {

// Kernel choices measured on a device, which dispatch prefers to its own (docs/kernel_choice.md).

struct KernelCandidate {
  std::string name;  // as `explain` says it; unique among a problem's candidates
  double us = 0;     // expected by the cost model; 0: it has no opinion
};
struct KernelCandidates {
  std::string key;     // the problems that share a tuned choice
  std::string chosen;  // what dispatch chooses by itself
  std::vector<KernelCandidate> all;
};

// The device of problems without one: those that a forced architecture answers for on the CPU.
inline constexpr int kNoDevice = -1;

// Calls of this thread use the candidate of that name, and throw InvalidArgument if it is none of the problem's; ""
// ends it. For timing candidates.
EPILOQ_API void force_kernel(std::string const& name);

// From now on problems of this key use the candidate of that name on this device; where it is no candidate, for
// example under a forced architecture, dispatch chooses by itself.
EPILOQ_API void set_tuned_kernel(int device, std::string const& key, std::string const& name);
EPILOQ_API void clear_tuned_kernels(int device);

// A digest of this build's kernel sources, for which a tuned choice holds.
EPILOQ_API std::string kernel_hash();

// Called with a device's index before its first problem is dispatched, to call set_tuned_kernel. None of it is called
// for kNoDevice.
EPILOQ_API void on_first_dispatch(std::function<void(int device)> load);

}  // namespace epiloq
