#pragma once

#include "epiloq/gate.h"
#include "kernels/common/device_code.cuh"

namespace epiloq {

// 1 / x of x >= 1 within one ulp, subnormals included: the instruction without .ftz, which also scales x below 2^-126,
// takes two more.
__device__ __forceinline__ float reciprocal(float x) {
  float const scale = x > 0x1p126f ? 0.25f : 1.f;
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x * scale));
  return inverse * scale;
}

// gate / (1 + exp(-alpha gate)) * factor
__device__ __forceinline__ float gated(float gate, float factor, float alpha) {
  return reciprocal(1.f + expf(-alpha * gate)) * gate * factor;
}

// A gate and a factor combined; kIsSilu: the gate has the defaults, which take no registers or instructions.
template <bool kIsSilu>
__device__ __forceinline__ float combined(Gate const& how, float gate, float factor) {
  if constexpr (kIsSilu) {
    return gated(gate, factor, 1.f);
  } else {
    return gated(min_nan(gate, how.limit), clamped(factor, -how.limit, how.limit) + how.offset, how.alpha);
  }
}

}  // namespace epiloq
