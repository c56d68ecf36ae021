#pragma once

// Loads of scales and zero points of rows g and g + 8, which are adjacent, from a stage: `at` counts values. Volatile,
// like those of ptx/shared_memory.cuh.

#include <cuda_fp16.h>

#include "epiloq/tensor.h"
#include "kernels/common/device_code.cuh"
#include "kernels/common/ptx/cp_async.cuh"
#include "kernels/common/ptx/shared_memory.cuh"
#include "kernels/common/w4a16/convert.cuh"

namespace epiloq::ops::weight_only_mm {

__device__ __forceinline__ Word load_byte_pair(SharedAddress at) {
  std::uint16_t both;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(both) : "r"(at));
  return both;
}

__device__ __forceinline__ float2 of_bfloat16s(Word both) {
  return {__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000u)};
}
__device__ __forceinline__ float2 of_halves(Word both) {
  return __half22float2(*reinterpret_cast<__half2 const*>(&both));
}

__device__ __forceinline__ float2 load_scale_pair(SharedAddress scales, int at, DType dtype) {
  if (dtype == DType::kFloat32) return gemm::load_shared_pair(scales + at * 4);
  Word const both = gemm::load_shared_bits(scales + at * 2);
  return dtype == DType::kBFloat16 ? of_bfloat16s(both) : of_halves(both);
}

}  // namespace epiloq::ops::weight_only_mm
