#pragma once

// Shared memory by its own addresses.

#include "core/async_copy.cuh"

namespace epiloq::gemm {

__device__ __forceinline__ float load_shared(SharedAddress from) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(from));
  return value;
}
__device__ __forceinline__ float2 load_shared_pair(SharedAddress from) {
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(from));
  return pair;
}

}  // namespace epiloq::gemm
