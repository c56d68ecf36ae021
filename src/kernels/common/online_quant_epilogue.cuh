#pragma once

// Epilogue of the online_quant_mm GEMM: reduces the FP32 sums of a tile's K groups in shared memory, applies the
// epilogue and writes rows.

#include "kernels/common/device_code.cuh"
#include "problems/online_quant_gemm.h"

namespace epiloq::gemm {

// kPadding puts the rows of the accumulator fragments in different banks.
template <int kTileM, int kTileN, int kKGroups, int kThreads, int kPadding>
struct OnlineQuantEpilogue {
  static constexpr int kPitch = kTileN + kPadding;
  static constexpr int kVector = 8;  // columns per thread
  static constexpr int kSharedBytes = kKGroups * kTileM * kPitch * 4;

  static __device__ void write(float* sums, int k_group, int row, int column, float2 pair) {
    *reinterpret_cast<float2*>(sums + (k_group * kTileM + row) * kPitch + column) = pair;
  }

  static __device__ void reduce(float const* sums, int row, int column, float (&x)[kVector]) {
#pragma unroll
    for (int k_group = 0; k_group < kKGroups; ++k_group) {
      auto const* const from = reinterpret_cast<float4 const*>(sums + (k_group * kTileM + row) * kPitch + column);
#pragma unroll
      for (int i = 0; i < kVector / 4; ++i) {
        float4 const four = from[i];
        float const values[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) x[4 * i + e] = k_group == 0 ? values[e] : x[4 * i + e] + values[e];
      }
    }
  }

  template <class T>
  static __device__ void store_typed(OnlineQuantGemmProblem const& p, float const* sums, int first_m, int first_n) {
    auto const* const bias = static_cast<T const*>(p.bias);
    bool const aligned =
        reinterpret_cast<std::uintptr_t>(p.out) % 16 == 0 && p.stride_out % (16 / static_cast<int>(sizeof(T))) == 0;
    for (int i = threadIdx.x % kThreads; i < kTileM * kTileN / kVector; i += kThreads) {
      int const row = i / (kTileN / kVector), column = i % (kTileN / kVector) * kVector;
      int const m = first_m + row, n = first_n + column;
      if (m >= p.m || n >= p.n) continue;
      float x[kVector];
      reduce(sums, row, column, x);
      alignas(16) T result[kVector];
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        float const with_bias = bias != nullptr && n + e < p.n ? x[e] + static_cast<float>(bias[n + e]) : x[e];
        result[e] = static_cast<T>(clamped(with_bias, p.lo, p.hi));
      }
      T* const target = static_cast<T*>(p.out) + m * p.stride_out + n;
      if (aligned && n + kVector <= p.n) {
#pragma unroll
        for (int v = 0; v < static_cast<int>(sizeof(result) / 16); ++v) {
          reinterpret_cast<int4*>(target)[v] = reinterpret_cast<int4 const*>(result)[v];
        }
      } else {
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          if (n + e < p.n) target[e] = result[e];
        }
      }
    }
  }

  static __device__ void store(OnlineQuantGemmProblem const& p, float const* sums, int first_m, int first_n) {
    switch (p.dtype) {
      case DType::kFloat16:
        return store_typed<__half>(p, sums, first_m, first_n);
      case DType::kBFloat16:
        return store_typed<__nv_bfloat16>(p, sums, first_m, first_n);
      default:
        return store_typed<float>(p, sums, first_m, first_n);
    }
  }
};

}  // namespace epiloq::gemm
