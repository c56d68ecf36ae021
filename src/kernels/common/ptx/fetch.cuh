#pragma once

// Loads of global memory into L1.

namespace epiloq {

// The 32 bytes around `at`.
__device__ __forceinline__ void fetch_sector(void const* at) {
  int unused;
  asm volatile("ld.global.ca.b32 %0, [%1];" : "=r"(unused) : "l"(at));
}

}  // namespace epiloq
