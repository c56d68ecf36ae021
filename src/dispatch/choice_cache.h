#pragma once

#include "dispatch/tuning.h"
#include "epiloq/device.h"
#include "kernels/common/params_cache.h"

namespace epiloq::gemm {

// Evaluating the cost model of dozens of candidates takes as long as a launch, so each thread caches its choices by
// problem, device, the forced architecture, and the state of the tuned choices.
template <class Problem, class Choose>
auto cached_choice(Problem const& problem, int device, Choose const& choose) {
  struct Key {
    Problem problem;
    Arch arch;
    std::uint64_t epoch;
    bool operator==(Key const&) const = default;
  };
  if (!tuning::forced_kernel().empty()) return choose();
  thread_local ParamsCache<Key, decltype(choose())> cache;
  auto const hash = static_cast<std::uintptr_t>(problem.n * 31 + problem.k * 7 + problem.m);
  return cache.get(hash, {problem, forced_arch(), tuning::epoch()}, device, choose);
}

}  // namespace epiloq::gemm
