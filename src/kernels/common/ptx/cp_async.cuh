#pragma once

// Copies from global into shared memory that a thread starts and later waits for (cp.async). Before SM80 they are done
// at once.

#include <cstdint>

namespace epiloq {

// Shared memory by its own address, of which sums are cheaper than of pointers.
using SharedAddress = unsigned;
__device__ __forceinline__ SharedAddress shared_address(void const* pointer) {
  return static_cast<SharedAddress>(__cvta_generic_to_shared(pointer));
}

// 16 bytes, both addresses multiples of 16; past L1.
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

// The first `bytes` of 16, an even number, and zeros; nothing else is read.
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

// Until at most kPending of this thread's committed groups are under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

}  // namespace epiloq
