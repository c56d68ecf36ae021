#pragma once

#include "epiloq/gate.h"
#include "kernels/common/device_code.cuh"

namespace epiloq {

// Applies the gate's limit and offset. kBranch skips the four instructions per value where there are none, which would
// slow down rows of a single CTA, but keeps all operands of a branch in registers and loads from moving across it.
template <bool kBranch, int kCount>
__device__ __forceinline__ void limit_and_offset(Gate const& gate, float (&gates)[kCount], float (&factors)[kCount]) {
  if (kBranch && gate.limit == __builtin_inff() && gate.offset == 0.f) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    gates[i] = min_nan(gates[i], gate.limit);
    factors[i] = clamped(factors[i], -gate.limit, gate.limit) + gate.offset;
  }
}

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

// The same of one gate and factor, with limit and offset.
template <class T>
__device__ __forceinline__ float gated(Gate const& gate, T value, T factor) {
  float gates[1] = {static_cast<float>(value)}, factors[1] = {static_cast<float>(factor)};
  limit_and_offset<false>(gate, gates, factors);
  return gated(gates[0], factors[0], gate.alpha);
}

}  // namespace epiloq
