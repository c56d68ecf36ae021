#pragma once

// Small pieces that hand-written kernels share.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "epiloq/tensor.h"

namespace epiloq {

template <DType>
struct CudaTypeOf;
template <>
struct CudaTypeOf<DType::kFloat16> {
  using type = __half;
};
template <>
struct CudaTypeOf<DType::kBFloat16> {
  using type = __nv_bfloat16;
};
template <>
struct CudaTypeOf<DType::kFloat32> {
  using type = float;
};
template <>
struct CudaTypeOf<DType::kInt8> {
  using type = std::int8_t;
};
template <>
struct CudaTypeOf<DType::kFloat8E4M3> {
  using type = __nv_fp8_e4m3;
};
template <>
struct CudaTypeOf<DType::kFloat8E5M2> {
  using type = __nv_fp8_e5m2;
};
template <DType kDType>
using CudaType = typename CudaTypeOf<kDType>::type;

// NaN wins, here and in all that is made of these, so that what holds one gets a scale that is one, and is not lost by
// a clamp.
__device__ __forceinline__ float min_nan(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a < b || a != a ? a : b;
#endif
}
__device__ __forceinline__ float max_nan(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a > b || a != a ? a : b;
#endif
}

// Two instructions; of `x < lo ? lo : x > hi ? hi : x` nvcc 13.0 makes two branches for every x where the bounds are a
// kernel's parameters.
__device__ __forceinline__ float clamped(float x, float lo, float hi) { return min_nan(max_nan(x, lo), hi); }

// A value that stays in its register: the compiler would rather compute it again in every turn of a loop.
__device__ __forceinline__ int in_register(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// What is the same for all lanes, said so: the compiler takes what depends on the thread's index, or on memory, for
// different, and copies it into uniform registers (of which wgmma's descriptors are made) wherever it is used.
__device__ __forceinline__ int warp_uniform(int value) { return __shfl_sync(~0u, value, 0); }

// Programmatic dependent launch: a kernel launched with it may start while the one before it still runs, and must wait
// before it touches what that one wrote. Both are nothing on architectures before SM90.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// A kernel launch that may overlap the tail of the kernel before it (ignored by devices before SM90), its blocks in
// clusters of that shape; more than one block needs SM90.
template <class... Parameters, class... Arguments>
cudaError_t launch_pdl_clusters(void (*kernel)(Parameters...), dim3 grid, dim3 cluster, dim3 block,
                                std::size_t shared_bytes, cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster.x;
  attributes[1].val.clusterDim.y = cluster.y;
  attributes[1].val.clusterDim.z = cluster.z;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster.x * cluster.y * cluster.z > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Arguments&&>(arguments)...);
}

template <class... Parameters, class... Arguments>
cudaError_t launch_pdl(void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t shared_bytes,
                       cudaStream_t stream, Arguments&&... arguments) {
  return launch_pdl_clusters(kernel, grid, dim3(1), block, shared_bytes, stream,
                             static_cast<Arguments&&>(arguments)...);
}

}  // namespace epiloq
