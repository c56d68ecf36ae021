#pragma once

#include "machine.h"

namespace cutlass::arch {

struct ClusterBarrier {
  std::uint64_t place;
  void init(int arrivals) const { emulated::mbarrier_init(emulated::address_of(this), arrivals); }
};
struct ClusterTransactionBarrier : ClusterBarrier {};
inline void fence_barrier_init() {}

}  // namespace cutlass::arch
