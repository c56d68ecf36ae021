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
inline float load_dsmem_float(float const* shared, int rank) {
  float value;
  SharedAddress const there = emulated::dsmem_address(emulated::address_of(shared), rank);
  std::memcpy(&value, emulated::memory_at(there, sizeof value), sizeof value);
  return value;
}
inline SharedAddress dsmem_address(SharedAddress here, int rank) { return emulated::dsmem_address(here, rank); }
template <class T>
void st_async(SharedAddress to, T const& value, SharedAddress barrier) {
  emulated::st_async(to, &value, sizeof value, barrier);
}
inline void init_dsmem_barrier(SharedAddress barrier, int bytes) {
  emulated::mbarrier_init(barrier, 1);
  emulated::mbarrier_expect_tx(barrier, bytes);
}
inline void wait_dsmem_barrier(SharedAddress barrier) { emulated::mbarrier_wait(barrier, 0); }

}  // namespace epiloq
