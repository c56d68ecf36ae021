#pragma once

// SM90: mbarriers, and TMA's copies, by addresses of shared memory.

#include <cuda.h>

#include <cstdint>
#include <cute/arch/cluster_sm90.hpp>

#include "kernels/common/ptx/cp_async.cuh"

namespace epiloq::gemm {

// An mbarrier's phase, of so many arrivals, waited for and arrived at. Reads and writes of shared memory stay on their
// side.
__device__ __forceinline__ void mbarrier_init(SharedAddress barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(SharedAddress barrier, std::uint32_t phase) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra ready;\n"
      "bra again;\nready:\n}" ::"r"(barrier),
      "r"(phase)
      : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(SharedAddress barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// In the block that the address is of. (`.release.cluster` would be a fence of the whole GPU, and what lies there is
// read by wgmma, which is done.)
__device__ __forceinline__ void mbarrier_arrive_cluster(SharedAddress barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Once this thread's small copies (cp_async.cuh) have landed.
__device__ __forceinline__ void mbarrier_arrive_cp_async(SharedAddress barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// And of that many bytes, which copies will have brought.
__device__ __forceinline__ void mbarrier_expect_tx(SharedAddress barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// The lane of a warp that asks for copies. ptxas knows then that it is one, where a comparison of the thread's index
// has it make a loop around each copy; but not if the answer goes through a variable to the branch.
__device__ __forceinline__ bool elect_one() { return cute::elect_one_sync(); }

// Asks for a box of a matrix from that column and row on; where it is absent it is zeros. The barrier counts its bytes.
__device__ __forceinline__ void tma_load(SharedAddress to, CUtensorMap const& map, int column, int row,
                                         SharedAddress barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// To the same place in both blocks of a cluster. Each block's own barrier counts what that block gets.
__device__ __forceinline__ void tma_load_multicast(SharedAddress to, CUtensorMap const& map, int column, int row,
                                                   SharedAddress barrier) {
  constexpr std::uint16_t kBoth = 3;
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(kBoth)
      : "memory");
}

// So many bytes in a row; addresses and their number are multiples of 16.
__device__ __forceinline__ void bulk_load(SharedAddress to, void const* from, int bytes, SharedAddress barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// The other way, once what this warp's lanes wrote has been fenced. What is outside the matrix stays, if its rows are
// of whole pieces of 16 bytes: TMA writes no less, whatever the map says. Boxes that a lane stored since its last
// commit are a group.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void tma_store(CUtensorMap const& map, int column, int row, SharedAddress from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(column),
               "r"(row), "r"(from)
               : "memory");
}
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until shared memory of all but the lane's last kPending groups has been read.
template <int kPending>
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// A copy into L2 alone.
__device__ __forceinline__ void tma_prefetch(CUtensorMap const& map, int column, int row) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(&map), "r"(column), "r"(row)
               : "memory");
}

}  // namespace epiloq::gemm
