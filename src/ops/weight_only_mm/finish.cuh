#pragma once

// From the sums of a block's warps, or of a cluster's blocks, to D: always in the same order.

#include "core/device_code.cuh"
#include "ops/weight_only_mm/kernels.h"

namespace epiloq::ops::weight_only_mm {

__device__ __forceinline__ void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// A float in the shared memory of another block of the cluster, where this block has one at the same place.
__device__ __forceinline__ float read_from(float const* shared, int rank) {
#if __CUDA_ARCH__ >= 900
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  float value;
  asm volatile("mapa.shared::cluster.u32 %0, %0, %2;\n\tld.shared::cluster.f32 %1, [%0];"
               : "+r"(address), "=f"(value)
               : "r"(rank)
               : "memory");
  return value;
#else
  return *shared;
#endif
}

template <class T>
__device__ __forceinline__ T finished(Problem const& p, int row, float sum) {
  float const value = sum + (p.bias != nullptr ? static_cast<float>(static_cast<T const*>(p.bias)[row]) : 0.f);
  // Not fmin and fmax, which lose NaN.
  return static_cast<T>(value < p.lo ? p.lo : value > p.hi ? p.hi : value);
}

template <class T>
__device__ __forceinline__ void store(Problem const& p, int token, int row, float sum) {
  if (row < p.weight.n) static_cast<T*>(p.out)[token * p.stride_out + row] = finished<T>(p, row, sum);
}

// sums: [parts][kTokens][kRows + 4] in shared memory, all of the block's written. Blocks of a cluster finish a share of
// the elements each.
template <class T, int kRows, int kTokens, int kParts>
__device__ void finish(Problem const& p, float* sums, int first_row, int first_token, int rank, int split) {
  constexpr int kStride = kRows + 4;
  int const threads = blockDim.x, elements = min(kTokens, p.m - first_token) * kRows;
  auto const add_parts = [&](int at) {
    float sum = 0.f;
#pragma unroll
    for (int part = 0; part < kParts; ++part) sum += sums[part * kTokens * kStride + at];
    return sum;
  };
  __syncthreads();
  if (split == 1) {
    for (int i = threadIdx.x; i < elements; i += threads) {
      int const token = i / kRows, row = i % kRows;
      store<T>(p, first_token + token, first_row + row, add_parts(token * kStride + row));
    }
    return;
  }
  if constexpr (kParts > 1) {
    for (int i = threadIdx.x; i < elements; i += threads) {
      int const at = i / kRows * kStride + i % kRows;
      sums[at] = add_parts(at);
    }
  }
  wait_for_cluster();
  for (int i = rank * threads + threadIdx.x; i < elements; i += split * threads) {
    int const token = i / kRows, row = i % kRows;
    float sum = 0.f;
    for (int other = 0; other < split; ++other) sum += read_from(sums + token * kStride + row, other);
    store<T>(p, first_token + token, first_row + row, sum);
  }
  wait_for_cluster();  // others may still read this block's sums
}

__device__ __forceinline__ float4 read_four_from(float const* shared, int rank) {
#if __CUDA_ARCH__ >= 900
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  float4 values;
  asm volatile("mapa.shared::cluster.u32 %0, %0, %5;\n\tld.shared::cluster.v4.f32 {%1, %2, %3, %4}, [%0];"
               : "+r"(address), "=f"(values.x), "=f"(values.y), "=f"(values.z), "=f"(values.w)
               : "r"(rank)
               : "memory");
  return values;
#else
  return *reinterpret_cast<float4 const*>(shared);
#endif
}

// The same for large tiles, by four rows at a time: sums[kTokens][kRows + 4] are there, of all blocks of the cluster.
template <class T, int kRows, int kTokens, int kThreads>
__device__ void finish_rows(Problem const& p, float const* sums, int first_row, int first_token, int rank, int split) {
  constexpr int kStride = kRows + 4, kVector = 4, kVectors = kRows / kVector;
  int const vectors = min(kTokens, p.m - first_token) * kVectors;
  bool const aligned = reinterpret_cast<std::uintptr_t>(p.out) % 8 == 0 && p.stride_out % kVector == 0;
  for (int i = rank * kThreads + threadIdx.x; i < vectors; i += split * kThreads) {
    int const token = first_token + i / kVectors, row = first_row + i % kVectors * kVector;
    float const* const from = sums + i / kVectors * kStride + i % kVectors * kVector;
    float sum[kVector] = {};
    for (int other = 0; other < split; ++other) {
      float4 const part = split > 1 ? read_four_from(from, other) : *reinterpret_cast<float4 const*>(from);
      sum[0] += part.x;
      sum[1] += part.y;
      sum[2] += part.z;
      sum[3] += part.w;
    }
    if (aligned && row + kVector <= p.weight.n) {
      alignas(8) T values[kVector];
#pragma unroll
      for (int e = 0; e < kVector; ++e) values[e] = finished<T>(p, row + e, sum[e]);
      *reinterpret_cast<uint2*>(static_cast<T*>(p.out) + token * p.stride_out + row) =
          *reinterpret_cast<uint2 const*>(values);
    } else {
#pragma unroll
      for (int e = 0; e < kVector; ++e) store<T>(p, token, row + e, sum[e]);
    }
  }
}

}  // namespace epiloq::ops::weight_only_mm
