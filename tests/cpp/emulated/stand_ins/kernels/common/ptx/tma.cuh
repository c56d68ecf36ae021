#pragma once

#include <cuda.h>

#include <cute/arch/cluster_sm90.hpp>

#include "kernels/common/ptx/cp_async.cuh"

namespace epiloq::gemm {

inline void mbarrier_wait(SharedAddress barrier, std::uint32_t phase) { emulated::mbarrier_wait(barrier, phase); }
inline void mbarrier_arrive(SharedAddress barrier) { emulated::mbarrier_arrive(barrier); }
inline void mbarrier_arrive_cluster(SharedAddress barrier) { emulated::arrive_at_distant_barrier(barrier); }
inline void mbarrier_arrive_cp_async(SharedAddress barrier) { emulated::arrive_after_small_copies(barrier); }
inline void mbarrier_expect_tx(SharedAddress barrier, int bytes) { emulated::mbarrier_expect_tx(barrier, bytes); }
inline bool elect_one() { return cute::elect_one_sync(); }

inline void tma_load(SharedAddress to, CUtensorMap const& map, int column, int row, SharedAddress barrier) {
  emulated::load_box(to, map, column, row, barrier);
}
inline void tma_load_multicast(SharedAddress to, CUtensorMap const& map, int column, int row, SharedAddress barrier) {
  emulated::load_box(to, map, column, row, barrier, 3);
}
inline void tma_prefetch(CUtensorMap const&, int, int) {}

inline void fence_proxy_async() {}
inline void tma_store(CUtensorMap const& map, int column, int row, SharedAddress from) {
  emulated::tma_store(map, column, row, from);
}
inline void tma_store_commit() { emulated::tma_store_commit(); }
template <int kPending>
void tma_store_wait() {
  emulated::tma_store_wait(kPending);
}

}  // namespace epiloq::gemm
