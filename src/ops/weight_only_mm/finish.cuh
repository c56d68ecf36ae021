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
__device__ __forceinline__ void store(Problem const& p, int token, int row, float sum) {
  if (row >= p.weight.n) return;
  float value = sum + (p.bias != nullptr ? static_cast<float>(static_cast<T const*>(p.bias)[row]) : 0.f);
  // Not fmin and fmax, which lose NaN.
  value = value < p.lo ? p.lo : value > p.hi ? p.hi : value;
  static_cast<T*>(p.out)[token * p.stride_out + row] = static_cast<T>(value);
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

}  // namespace epiloq::ops::weight_only_mm
