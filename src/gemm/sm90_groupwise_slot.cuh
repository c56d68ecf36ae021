#pragma once

// Slots of shared memory by which the group-wise kernel's tiles leave.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "gemm/groupwise_problem.h"

namespace epiloq::gemm {

// A warp's rows by a line of columns, in the order of TMA's swizzle, of which no two lanes' writes meet in a bank.
template <class C>
struct GroupwiseSlot {
  using Out = typename C::Out;
  static constexpr int kUnit = 16 / sizeof(Out);  // elements that are written at once

  // Whether D can be written 16 bytes at a time.
  static __host__ __device__ bool has_lines(GroupwiseProblem const& p) {
    return p.stride_d % kUnit == 0 && reinterpret_cast<std::uintptr_t>(p.d) % 16 == 0;
  }

  static __device__ __forceinline__ int swizzled(int row, int column) {
    return (row * C::kLine + column * static_cast<int>(sizeof(Out))) ^ (row % 8 * 16);
  }

  static __device__ __forceinline__ void put(unsigned char* at, float a, float b) {
    if constexpr (std::is_same_v<Out, __nv_bfloat16>) {
      *reinterpret_cast<__nv_bfloat162*>(at) = __floats2bfloat162_rn(a, b);
    } else if constexpr (std::is_same_v<Out, __half>) {
      *reinterpret_cast<__half2*>(at) = __floats2half2_rn(a, b);
    } else {
      *reinterpret_cast<float2*>(at) = {a, b};
    }
  }

  // A slot's `columns`, of which some may be past D's last, as rows past the tile's.
  static __device__ __forceinline__ void copy(unsigned char const* slot, GroupwiseProblem const& p, int first_row,
                                              int end_row, int first_column, int columns, int lane) {
    auto* const target = static_cast<Out*>(p.d) + first_row * p.stride_d + first_column;
    int const rows = min(C::kWarpRows, end_row - first_row);
    if (first_column + columns <= p.n && has_lines(p)) {
      int const units = columns / kUnit;
#pragma unroll
      for (int i = lane; i < C::kWarpRows * units; i += 32) {
        int const row = i / units, column = i % units * kUnit;
        int4 const unit = *reinterpret_cast<int4 const*>(slot + swizzled(row, column));
        if (row < rows) *reinterpret_cast<int4*>(target + row * p.stride_d + column) = unit;
      }
    } else {
      int const known = min(columns, p.n - first_column);
#pragma unroll 1
      for (int i = lane; i < rows * C::kChunk; i += 32) {
        int const row = i / C::kChunk, column = i % C::kChunk;
        if (column < known) {
          target[row * p.stride_d + column] = *reinterpret_cast<Out const*>(slot + swizzled(row, column));
        }
      }
    }
  }
};

}  // namespace epiloq::gemm
