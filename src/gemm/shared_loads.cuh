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

__device__ __forceinline__ uint4 load_shared_four(SharedAddress from) {
  uint4 four;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
               : "r"(from)
               : "memory");
  return four;
}
__device__ __forceinline__ void store_shared_four(SharedAddress to, uint4 four) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(four.x), "r"(four.y), "r"(four.z), "r"(four.w)
               : "memory");
}

}  // namespace epiloq::gemm
