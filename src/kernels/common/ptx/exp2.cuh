#pragma once

namespace epiloq {

// 2^x to within 2^-22 of it; 0 for x below -126.
__device__ __forceinline__ float exp2_approximate(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace epiloq
