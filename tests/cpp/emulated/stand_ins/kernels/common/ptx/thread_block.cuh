#pragma once

#include "machine.h"

namespace epiloq {

inline constexpr struct {
  operator unsigned char*() const { return emulated::block_memory(); }
} block_memory{};

template <int kBarrier, int kThreads>
void wait_for_threads() {
  emulated::wait_at_named_barrier(kBarrier, kThreads);
}

}  // namespace epiloq
