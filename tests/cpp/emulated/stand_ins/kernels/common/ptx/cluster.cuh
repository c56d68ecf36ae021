#pragma once

#include "kernels/common/ptx/cp_async.cuh"

namespace epiloq {

inline void say_ready() { emulated::arrive_at_cluster(); }
inline void wait_for_ready() { emulated::wait_for_cluster(); }
inline SharedAddress address_in_block(SharedAddress here, int rank) { return emulated::address_in_block(here, rank); }
template <class T>
void send(SharedAddress to, T const& value, SharedAddress barrier) {
  emulated::send(to, &value, sizeof value, barrier);
}
inline void wait_for_sent(SharedAddress barrier) { emulated::wait_for_barrier(barrier, 0); }

}  // namespace epiloq
