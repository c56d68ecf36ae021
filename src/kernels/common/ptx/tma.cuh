#pragma once

// SM90: mbarrier and TMA wrappers by shared-memory address.

#include <cuda.h>

#include <cstdint>
#include <cute/arch/cluster_sm90.hpp>

#include "kernels/common/ptx/cp_async.cuh"

namespace epiloq::gemm {

// mbarrier with `arrivals` arrivals per phase. The memory clobbers keep shared-memory accesses on their side of it.
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
// Arrives at a barrier of another CTA of the cluster. Not `.release.cluster`, which would be a fence of the whole GPU:
// what it guards is read by wgmma, which has completed.
__device__ __forceinline__ void mbarrier_arrive_cluster(SharedAddress barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives when this thread's cp.async copies have landed.
__device__ __forceinline__ void mbarrier_arrive_cp_async(SharedAddress barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Arrives and adds `bytes` to what the phase expects from copies.
__device__ __forceinline__ void mbarrier_expect_tx(SharedAddress barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// One lane of a warp. With elect.sync ptxas knows that a single lane is active; comparing the thread index makes it
// emit a loop around each copy. The result must go straight to the branch, not through a variable.
__device__ __forceinline__ bool elect_one() { return cute::elect_one_sync(); }

// Loads a 2-D box from (column, row); out-of-bounds elements are zero. The barrier counts the box's bytes.
__device__ __forceinline__ void tma_load(SharedAddress to, CUtensorMap const& map, int column, int row,
                                         SharedAddress barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// Loads the same box into both CTAs of a cluster, at the same offset; each CTA's own barrier counts its bytes.
__device__ __forceinline__ void tma_load_multicast(SharedAddress to, CUtensorMap const& map, int column, int row,
                                                   SharedAddress barrier) {
  constexpr std::uint16_t kBoth = 3;
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(kBoth)
      : "memory");
}

// Copies contiguous bytes; addresses and size are multiples of 16.
__device__ __forceinline__ void bulk_load(SharedAddress to, void const* from, int bytes, SharedAddress barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// TMA stores, after fence_proxy_async has made this warp's writes visible to the async proxy. Elements outside the
// matrix are not written if rows are whole multiples of 16 bytes: TMA writes no smaller unit. Stores since a lane's
// last commit form a group.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void tma_store(CUtensorMap const& map, int column, int row, SharedAddress from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(column),
               "r"(row), "r"(from)
               : "memory");
}
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until shared memory of all but the lane's last kPending groups has been read.
template <int kPending>
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Prefetches a box into L2.
__device__ __forceinline__ void tma_prefetch(CUtensorMap const& map, int column, int row) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(&map), "r"(column), "r"(row)
               : "memory");
}

}  // namespace epiloq::gemm
