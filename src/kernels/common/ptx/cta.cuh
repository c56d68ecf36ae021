#pragma once

// What the threads of a block have together.

namespace epiloq {

// The shared memory that a launch asks for, aligned for any swizzle. (A function that returns it changes what ptxas
// makes of some kernels.)
extern __shared__ __align__(1024) unsigned char dynamic_smem[];

// A barrier for so many of the threads, of whole warps. Number 0 is __syncthreads's.
template <int kBarrier, int kThreads>
__device__ __forceinline__ void named_barrier_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

}  // namespace epiloq
