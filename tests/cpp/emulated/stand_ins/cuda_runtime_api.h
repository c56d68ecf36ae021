#pragma once

// The runtime, of which a launch is a run of the machine, and what kernels find without including it.

#include <cuda.h>

#include <algorithm>
#include <bit>
#include <cstddef>

#include "machine.h"

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

using std::max;
using std::min;
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
// Bytes of two words, by nibbles of `order`.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned order) {
  unsigned long long const both = low | static_cast<unsigned long long>(high) << 32;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(both >> (order >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}
inline unsigned __vcmpne4(unsigned a, unsigned b) {
  unsigned result = 0;
  for (int byte = 0; byte < 32; byte += 8) result |= ((a ^ b) >> byte & 0xff) != 0 ? 0xffu << byte : 0;
  return result;
}
// Lanes count from the first of `width` that the caller's lane is in.
template <class T>
T __shfl_sync(unsigned, T value, int lane, int width = 32) {
  int const first = static_cast<int>(threadIdx.x % 32) / width * width;
  return std::bit_cast<T>(emulated::shuffle(std::bit_cast<std::uint32_t>(value), first + lane % width));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
  return __shfl_sync(mask, value, static_cast<int>(threadIdx.x % 32) ^ bits);
}
inline int __shfl_up_sync(unsigned mask, int value, int offset) {
  int const lane = static_cast<int>(threadIdx.x % 32);
  return __shfl_sync(mask, value, lane < offset ? lane : lane - offset);
}
inline unsigned __ballot_sync(unsigned mask, bool is_set) {
  unsigned set = 0;
  for (int lane = 0; lane < 32; ++lane) set |= static_cast<unsigned>(__shfl_sync(mask, int{is_set}, lane)) << lane;
  return set;
}
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __any_sync(unsigned, int predicate) {
  int any = 0;
  for (int lane = 0; lane < 32; ++lane) any |= emulated::shuffle(predicate != 0, lane);
  return any;
}
template <class T>
T __ldg(T const* from) {
  return *from;
}
inline void* __cvta_generic_to_global(void* at) { return at; }
inline void __syncwarp() { emulated::sync_warp(); }
inline void __syncthreads() { emulated::sync_threads(); }

using cudaStream_t = struct CUstream_st*;
enum cudaError_t { cudaSuccess };
inline char const* cudaGetErrorString(cudaError_t) { return ""; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int) {
  return cudaSuccess;
}

enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum { cudaEnableDefault };
// There is but one that anybody asks for.
inline cudaError_t cudaGetDriverEntryPointByVersion(char const*, void** symbol, unsigned, int,
                                                    cudaDriverEntryPointQueryResult* found) {
  *symbol = reinterpret_cast<void*>(&cuTensorMapEncodeTiled), *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization, cudaLaunchAttributeClusterDimension };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
    dim3 clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(cudaLaunchConfig_t const* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  unsigned cluster = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) cluster = config->attrs[i].val.clusterDim.x;
  }
  emulated::run({config->gridDim.x, config->blockDim.x, cluster, config->dynamicSmemBytes},
                [&] { kernel(static_cast<Parameters>(arguments)...); });
  return cudaSuccess;
}
