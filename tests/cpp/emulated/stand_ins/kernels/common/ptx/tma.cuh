#pragma once

#include <cuda.h>

#include <cute/arch/cluster_sm90.hpp>

#include "kernels/common/ptx/cp_async.cuh"

namespace epiloq::gemm {

inline void wait_for_barrier(SharedAddress barrier, std::uint32_t phase) { emulated::wait_for_barrier(barrier, phase); }
inline void arrive_at_barrier(SharedAddress barrier) { emulated::arrive_at_barrier(barrier); }
inline void arrive_at_barrier_of_cluster(SharedAddress barrier) { emulated::arrive_at_distant_barrier(barrier); }
inline void arrive_after_copies(SharedAddress barrier) { emulated::arrive_after_small_copies(barrier); }
inline void expect_bytes(SharedAddress barrier, int bytes) { emulated::expect_bytes(barrier, bytes); }
inline bool is_elected() { return cute::elect_one_sync(); }

inline void copy_box(SharedAddress to, CUtensorMap const& map, int column, int row, SharedAddress barrier) {
  emulated::load_box(to, map, column, row, barrier);
}
inline void copy_box_to_both(SharedAddress to, CUtensorMap const& map, int column, int row, SharedAddress barrier) {
  emulated::load_box(to, map, column, row, barrier, 3);
}
inline void prefetch_box(CUtensorMap const&, int, int) {}

inline void fence_stored() {}
inline void store_box(CUtensorMap const& map, int column, int row, SharedAddress from) {
  emulated::store_box(map, column, row, from);
}
inline void commit_stores() { emulated::commit_stores(); }
template <int kPending>
void wait_for_stores() {
  emulated::wait_for_stores(kPending);
}

}  // namespace epiloq::gemm
