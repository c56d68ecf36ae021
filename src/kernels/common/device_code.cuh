#pragma once

// Device helpers that hand-written kernels share: element types, NaN-propagating min and max, PDL.

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

// min and max that return NaN if either operand is NaN, so that a row with NaN gets a NaN scale and clamping keeps NaN.
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

// Two instructions. nvcc 13.0 compiles `x < lo ? lo : x > hi ? hi : x` to two branches per value if the bounds are
// kernel parameters.
__device__ __forceinline__ float clamped(float x, float lo, float hi) { return min_nan(max_nan(x, lo), hi); }

// Keeps a value in its register; otherwise the compiler recomputes it in every iteration.
__device__ __forceinline__ int in_register(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Tells the compiler that a value is the same in all lanes. It otherwise treats anything that depends on the thread
// index or on memory as divergent and copies it to uniform registers (which wgmma descriptors need) at each use.
__device__ __forceinline__ int warp_uniform(int value) { return __shfl_sync(~0u, value, 0); }

// Programmatic dependent launch (PDL): a kernel launched with the attribute may start while its predecessor still runs,
// and must call pdl_wait before it reads or overwrites anything that the predecessor wrote or reads. Both calls are
// no-ops before SM90.
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

// Launches a kernel with the PDL attribute (ignored before SM90) in clusters of the given shape; clusters of more than
// one CTA need SM90.
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
