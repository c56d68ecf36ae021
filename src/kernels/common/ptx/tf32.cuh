#pragma once

// Splits floats into TF32 parts for tensor cores.

namespace epiloq {

// A float as the sum of two TF32 numbers: error at most 2^-22 relative down to 2^-115. NaN stays NaN; an infinity may
// become NaN. The low 13 bits, which tensor cores ignore, are zero.
inline constexpr unsigned kTf32Bits = 0xffffe000u;
__device__ __forceinline__ float high_tf32(float x) { return __uint_as_float(__float_as_uint(x) & kTf32Bits); }
__device__ __forceinline__ float low_tf32(float x) {
  return high_tf32(__uint_as_float(__float_as_uint(__fsub_rn(x, high_tf32(x))) + 0x1000u));
}

}  // namespace epiloq
