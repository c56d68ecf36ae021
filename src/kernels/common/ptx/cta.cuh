#pragma once

// Dynamic shared memory and named barriers of a CTA.

namespace epiloq {

// Dynamic shared memory, aligned for any swizzle. (Returning it from a function changes ptxas's output for some
// kernels.)
extern __shared__ __align__(1024) unsigned char dynamic_smem[];

// Named barrier of kThreads threads, whole warps. Barrier 0 is __syncthreads.
template <int kBarrier, int kThreads>
__device__ __forceinline__ void named_barrier_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

}  // namespace epiloq
