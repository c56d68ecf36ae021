#pragma once

// PTX of the weight-only kernels: LOP3, pairs of 16-bit floats, mma.sync. tests/cpp/emulated has stand-ins.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace epiloq::ops::weight_only_mm {

using Word = std::uint32_t;

// (a & mask) | power in one LOP3; the compiler emits two.
__device__ __forceinline__ Word masked_or(Word a, Word mask, Word power) {
  Word result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(a), "r"(mask), "r"(power));
  return result;
}

__device__ __forceinline__ Word subtract(Word a, Word b) {
  Word result;
  asm("sub.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// a b + c of pairs, rounded once; subnormal numbers are not flushed.
template <class T>
__device__ __forceinline__ Word multiply_add_pairs(Word a, Word b, Word c);
template <>
__device__ __forceinline__ Word multiply_add_pairs<__half>(Word a, Word b, Word c) {
  Word result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}
template <>
__device__ __forceinline__ Word multiply_add_pairs<__nv_bfloat16>(Word a, Word b, Word c) {
  Word result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

// D = A B + C. SM75's instruction has half the depth and no bfloat16.
template <class T>
__device__ __forceinline__ void mma(float (&d)[4], Word const (&a)[4], Word b0, Word b1, float const (&c)[4]);

template <>
__device__ __forceinline__ void mma<__half>(float (&d)[4], Word const (&a)[4], Word b0, Word b1, float const (&c)[4]) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
#else
  float e[4];
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%8,%9,%10};"
      : "=f"(e[0]), "=f"(e[1]), "=f"(e[2]), "=f"(e[3])
      : "r"(a[0]), "r"(a[1]), "r"(b0), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%8,%9,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[2]), "r"(a[3]), "r"(b1), "f"(e[0]), "f"(e[1]), "f"(e[2]), "f"(e[3]));
#endif
}

template <>
__device__ __forceinline__ void mma<__nv_bfloat16>(float (&d)[4], Word const (&a)[4], Word b0, Word b1,
                                                   float const (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

}  // namespace epiloq::ops::weight_only_mm
