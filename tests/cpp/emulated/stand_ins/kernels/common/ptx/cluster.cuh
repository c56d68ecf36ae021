#pragma once

#include <cstring>

#include "kernels/common/ptx/cp_async.cuh"

namespace epiloq {

inline void cluster_arrive() { emulated::arrive_at_cluster(); }
inline void cluster_wait() { emulated::cluster_sync(); }
inline void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}
inline uint4 load_dsmem(SharedAddress address, int rank) {
  uint4 value;
  std::memcpy(&value, emulated::memory_at(emulated::dsmem_address(address, rank), sizeof value), sizeof value);
  return value;
}
inline SharedAddress dsmem_address(SharedAddress here, int rank) { return emulated::dsmem_address(here, rank); }
template <class T>
void st_async(SharedAddress to, T const& value, SharedAddress barrier) {
  emulated::st_async(to, &value, sizeof value, barrier);
}
inline void wait_dsmem_barrier(SharedAddress barrier) { emulated::mbarrier_wait(barrier, 0); }

}  // namespace epiloq
