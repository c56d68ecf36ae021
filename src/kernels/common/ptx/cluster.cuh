#pragma once

// What blocks of a cluster do together (SM90); elsewhere a block is alone, and nothing here is called.

#include "kernels/common/ptx/cp_async.cuh"

namespace epiloq {

__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// 16 bytes of the shared memory of another block of the cluster, at an address of this one's.
__device__ __forceinline__ uint4 load_dsmem(SharedAddress address, int rank) {
  uint4 value = {};
#if __CUDA_ARCH__ >= 900
  asm volatile("mapa.shared::cluster.u32 %4, %4, %5;\n\tld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=&r"(value.x), "=&r"(value.y), "=&r"(value.z), "=&r"(value.w), "+r"(address)
               : "r"(rank)
               : "memory");
#endif
  return value;
}

// Before a block may write another's shared memory that one has to have begun, or to be done with what lies there: all
// threads that have not left say so, and later wait. That its barriers are there is said by the fence of whoever made
// them; `.release` here is a fence of the whole GPU.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// An address of this block's shared memory, in another block's.
__device__ __forceinline__ SharedAddress dsmem_address(SharedAddress here, int rank) {
  SharedAddress address = here;
#if __CUDA_ARCH__ >= 900
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(here), "r"(rank));
#endif
  return address;
}

// One thread makes a barrier that waits for so many bytes from others, before the block says that it has begun. Others
// may know of the barrier before of the bytes: its phase lasts until this thread has arrived, with them.
__device__ __forceinline__ void init_dsmem_barrier(SharedAddress barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;\n\t"
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
      "r"(bytes)
      : "memory");
#endif
}

// Writes into the shared memory of a block, whose barrier counts the bytes.
__device__ __forceinline__ void st_async(SharedAddress to, uint4 const& value, SharedAddress barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
      "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(barrier)
      : "memory");
#endif
}
__device__ __forceinline__ void st_async(SharedAddress to, std::uint32_t bits, SharedAddress barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to), "r"(bits),
               "r"(barrier)
               : "memory");
#endif
}
__device__ __forceinline__ void st_async(SharedAddress to, float4 const& value, SharedAddress barrier) {
  auto const bits = [](float x) { return __float_as_uint(x); };
  st_async(to, uint4{bits(value.x), bits(value.y), bits(value.z), bits(value.w)}, barrier);
}

// What other blocks have sent is acquired from the cluster; of the barrier's first phase.
__device__ __forceinline__ void wait_dsmem_barrier(SharedAddress barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n@done bra ready;\n"
      "bra again;\nready:\n}" ::"r"(barrier)
      : "memory");
#endif
}

}  // namespace epiloq
