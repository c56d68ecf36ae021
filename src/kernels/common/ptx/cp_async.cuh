#pragma once

// cp.async: copies from global to shared memory in groups. Before SM80 they are plain synchronous copies.

#include <cstdint>

namespace epiloq {

// A 32-bit shared-memory address: cheaper arithmetic than a generic pointer.
using SharedAddress = unsigned;
__device__ __forceinline__ SharedAddress shared_address(void const* pointer) {
  return static_cast<SharedAddress>(__cvta_generic_to_shared(pointer));
}

// 16 bytes, both addresses multiples of 16; bypasses L1.
__device__ __forceinline__ void cp_async16(SharedAddress to, void const* from) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
#else
  *static_cast<uint4*>(__cvta_shared_to_generic(to)) = __ldcg(static_cast<uint4 const*>(from));
#endif
}

// 4 bytes, both addresses multiples of 4.
__device__ __forceinline__ void cp_async4(SharedAddress to, void const* from) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
#else
  *static_cast<unsigned*>(__cvta_shared_to_generic(to)) = *static_cast<unsigned const*>(from);
#endif
}

// Copies the first `bytes` (an even number) of 16 and fills the rest with zeros; reads nothing beyond.
__device__ __forceinline__ void cp_async16(SharedAddress to, void const* from, int bytes) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
#else
  auto* const target = static_cast<std::uint16_t*>(__cvta_shared_to_generic(to));
  auto const* const source = static_cast<std::uint16_t const*>(from);
#pragma unroll
  for (int i = 0; i < 8; ++i) target[i] = 2 * i < bytes ? source[i] : std::uint16_t{0};
#endif
}

__device__ __forceinline__ void cp_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most kPending of this thread's committed groups are in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

}  // namespace epiloq
