#pragma once

#include "machine.h"

namespace epiloq {

inline constexpr struct {
  operator unsigned char*() const { return emulated::dynamic_smem(); }
} dynamic_smem{};

template <int kBarrier, int kThreads>
void named_barrier_sync() {
  emulated::wait_at_named_barrier(kBarrier, kThreads);
}

}  // namespace epiloq
