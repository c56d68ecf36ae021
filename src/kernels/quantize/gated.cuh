#pragma once

namespace epiloq {

// gate / (1 + exp(-gate)) * up. The approximate reciprocal is within one ulp, subnormals included.
__device__ __forceinline__ float gated(float gate, float up) {
  float sigmoid;
  asm("rcp.approx.f32 %0, %1;" : "=f"(sigmoid) : "f"(1.f + expf(-gate)));
  return gate * sigmoid * up;
}

}  // namespace epiloq
