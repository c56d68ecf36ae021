#pragma once

namespace epiloq {

// A float as the sum of two tf32, 2^-22 of it apart at most from 2^-115 on (below, the low part is lost bit by bit).
// The sum of NaN is NaN; an infinity's may be. (Tensor cores leave out the 13 bits that tf32 has not; they are zeros
// here.)
inline constexpr unsigned kTf32Bits = 0xffffe000u;
__device__ __forceinline__ float high_tf32(float x) { return __uint_as_float(__float_as_uint(x) & kTf32Bits); }
__device__ __forceinline__ float low_tf32(float x) {
  return high_tf32(__uint_as_float(__float_as_uint(__fsub_rn(x, high_tf32(x))) + 0x1000u));
}

}  // namespace epiloq
