#pragma once

// Loads and stores by 32-bit shared-memory address. Loads are volatile because the barrier waits that guard them do not
// tell the compiler what memory they guard.

#include "kernels/common/ptx/cp_async.cuh"

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
__device__ __forceinline__ float4 load_shared_four(SharedAddress from) {
  float4 four;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
               : "r"(from));
  return four;
}

__device__ __forceinline__ std::uint32_t load_shared_bits(SharedAddress from) {
  std::uint32_t bits;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(bits) : "r"(from));
  return bits;
}
__device__ __forceinline__ void load_shared(std::uint32_t (&bits)[4], SharedAddress from) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(bits[0]), "=r"(bits[1]), "=r"(bits[2]), "=r"(bits[3])
               : "r"(from));
}

__device__ __forceinline__ void store_shared_pair(SharedAddress to, float2 pair) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(pair.x), "f"(pair.y) : "memory");
}

__device__ __forceinline__ void store_shared_four(SharedAddress to, float4 const& four) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(four.x), "f"(four.y), "f"(four.z), "f"(four.w)
               : "memory");
}

// SM90: stores four 8 x 8 matrices of 16 bits, transposed: columns become rows of 16 bytes. A thread holds two
// neighbours of row lane / 4 of each; lane l gives the address for column l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4_trans(SharedAddress to, unsigned const (&matrices)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(matrices[0]),
               "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
               : "memory");
}

}  // namespace epiloq::gemm
