#pragma once

// What the quantising kernels share: the range of values, and int32 packed into int8.

namespace epiloq {

constexpr float kSmallestNormal = 1.17549435e-38f;

struct Range {
  float lo, hi;
};

// NaN wins, so that a row that holds one gets a scale that is one.
__device__ __forceinline__ float lower(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a < b || a != a ? a : b;
#endif
}
__device__ __forceinline__ float upper(float a, float b) { return -lower(-a, -b); }
__device__ __forceinline__ Range merge(Range a, Range b) { return {lower(a.lo, b.lo), upper(a.hi, b.hi)}; }

__device__ __forceinline__ Range empty() { return {__builtin_inff(), -__builtin_inff()}; }

// Four int32 to four int8, saturating.
__device__ __forceinline__ unsigned pack(int a, int b, int c, int d) {
  unsigned low, all;
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, 0;" : "=r"(low) : "r"(d), "r"(c));
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(all) : "r"(b), "r"(a), "r"(low));
  return all;
}

}  // namespace epiloq
