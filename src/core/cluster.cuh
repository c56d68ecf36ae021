#pragma once

// What blocks of a cluster do together (SM90); elsewhere a block is alone, and nothing here is called.

#include "core/async_copy.cuh"

namespace epiloq {

__device__ __forceinline__ void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// 16 bytes of the shared memory of another block of the cluster, at an address of this one's.
__device__ __forceinline__ uint4 read_from_block(SharedAddress address, int rank) {
  uint4 value = {};
#if __CUDA_ARCH__ >= 900
  asm volatile("mapa.shared::cluster.u32 %4, %4, %5;\n\tld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=&r"(value.x), "=&r"(value.y), "=&r"(value.z), "=&r"(value.w), "+r"(address)
               : "r"(rank)
               : "memory");
#endif
  return value;
}

}  // namespace epiloq
