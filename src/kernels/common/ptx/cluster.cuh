#pragma once

// Thread block clusters and distributed shared memory (SM90). Before SM90 these are no-ops and are not called.

#include "kernels/common/ptx/cp_async.cuh"

namespace epiloq {

__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// Loads 16 bytes from another CTA's shared memory, at an address of this CTA's.
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

// Loads a float of another CTA's shared memory, at the offset it has in this CTA's.
__device__ __forceinline__ float load_dsmem_float(float const* shared, int rank) {
#if __CUDA_ARCH__ >= 900
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  float value;
  asm volatile("mapa.shared::cluster.u32 %0, %0, %2;\n\tld.shared::cluster.f32 %1, [%0];"
               : "+r"(address), "=f"(value)
               : "r"(rank)
               : "memory");
  return value;
#else
  return *shared;
#endif
}

// Cluster barrier in two halves: before a CTA may write another's shared memory, that CTA must have started, or be done
// with what was there. Arrival is relaxed, as the fence after mbarrier_init already publishes the barriers; `.release`
// would be a fence of the whole GPU.
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

// Maps an address of this CTA's shared memory to another CTA's.
__device__ __forceinline__ SharedAddress dsmem_address(SharedAddress here, int rank) {
  SharedAddress address = here;
#if __CUDA_ARCH__ >= 900
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(here), "r"(rank));
#endif
  return address;
}

// One thread initialises a barrier that expects `bytes` from other CTAs, before its CTA arrives at the cluster barrier.
// The phase lasts until this thread has arrived with the byte count, so others may see the barrier first.
__device__ __forceinline__ void init_dsmem_barrier(SharedAddress barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;\n\t"
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
      "r"(bytes)
      : "memory");
#endif
}

// Asynchronous store to another CTA's shared memory; the barrier there counts the bytes.
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

// Waits, with cluster-scope acquire, until what other CTAs stored has arrived; for the barrier's first phase.
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
