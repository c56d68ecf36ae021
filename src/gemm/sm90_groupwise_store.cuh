#pragma once

// How the group-wise kernel's tiles leave: scales of whole rows, bias, conversion, whole lines.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "gemm/sm90_groupwise_tile.cuh"

namespace epiloq::gemm {

template <class C>
struct GroupwiseStore {
  using Out = typename C::Out;
  static constexpr int kUnit = 16 / sizeof(Out);  // elements that are written at once
  static constexpr int kUnits = C::kChunk / kUnit;

  // 16 rows of a warp's tile: sums and bias to Out, in shared memory, then to D in lines.
  static __device__ void tile(float (&sums)[C::kN / 2], GroupwiseProblem const& p, GroupwiseTile const& tile,
                              unsigned char* staging, int row_in_tile, int lane) {
    if (p.bias != nullptr) add_bias(sums, p, tile.first_column, lane);
    int const first_row = tile.first_row + row_in_tile;
    bool const on_lines = p.stride_d % kUnit == 0 && reinterpret_cast<std::uintptr_t>(p.d) % 16 == 0;
    bool const whole = on_lines && first_row + 16 <= tile.end_row && tile.first_column + C::kN <= p.n;
#pragma unroll
    for (int chunk = 0; chunk < C::kN / C::kChunk; ++chunk) {
      __syncwarp();
#pragma unroll
      for (int j = 0; j < C::kChunk / 8; ++j) {
        float const* const s = sums + chunk * (C::kChunk / 2) + 4 * j;
        put(staging, lane / 4, 8 * j + 2 * (lane % 4), s[0], s[1]);
        put(staging, lane / 4 + 8, 8 * j + 2 * (lane % 4), s[2], s[3]);
      }
      __syncwarp();
      int const first_column = tile.first_column + chunk * C::kChunk;
      auto* const target = static_cast<Out*>(p.d) + first_row * p.stride_d + first_column;
      if (whole) {
#pragma unroll
        for (int i = lane; i < 16 * kUnits; i += 32) {
          auto const* const source = staging + i / kUnits * C::kPitch + i % kUnits * 16;
          *reinterpret_cast<int4*>(target + i / kUnits * p.stride_d + i % kUnits * kUnit) =
              *reinterpret_cast<int4 const*>(source);
        }
      } else {
        int const rows = min(16, tile.end_row - first_row), columns = min(C::kChunk, p.n - first_column);
#pragma unroll 1
        for (int i = lane; i < rows * C::kChunk; i += 32) {
          int const row = i / C::kChunk, column = i % C::kChunk;
          auto const* const source = reinterpret_cast<Out const*>(staging + row * C::kPitch);
          if (column < columns) target[row * p.stride_d + column] = source[column];
        }
      }
    }
  }

  // Whole rows' scales, in scaled_mm's order: scale_a (scale_b sum).
  static __device__ __forceinline__ void scale(float (&scaled)[C::kN / 2], typename C::Sum const (&sums)[C::kN / 2],
                                               GroupwiseProblem const& p, GroupwiseTile const& tile, int row_in_tile,
                                               int lane) {
    int const last_row = max(tile.end_row - 1, 0), row = tile.first_row + row_in_tile + lane / 4;
    auto const of_row = [&](int r) { return p.scale_a.ptr[std::int64_t{min(r, last_row)} * p.scale_a.stride_row]; };
    float const low = of_row(row), high = of_row(row + 8);
    float const* const columns = p.scale_b.ptr + std::int64_t{tile.expert} * p.scale_b_expert;
#pragma unroll
    for (int j = 0; j < C::kN / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int const column = min(tile.first_column + 8 * j + 2 * (lane % 4) + i, p.n - 1);
        float const of_column = columns[std::int64_t{column} * p.scale_b.stride_row];
        scaled[4 * j + i] = low * (of_column * value(sums[4 * j + i]));
        scaled[4 * j + 2 + i] = high * (of_column * value(sums[4 * j + 2 + i]));
      }
    }
  }

 private:
  static __device__ __forceinline__ float value(float sum) { return sum; }
  static __device__ __forceinline__ float value(std::uint32_t sum) { return static_cast<float>(static_cast<int>(sum)); }

  static __device__ void add_bias(float (&sums)[C::kN / 2], GroupwiseProblem const& p, int first_column, int lane) {
    auto const* const bias = static_cast<Out const*>(p.bias);
#pragma unroll
    for (int j = 0; j < C::kN / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int const column = first_column + 8 * j + 2 * (lane % 4) + i;
        float const value = column < p.n ? static_cast<float>(bias[column]) : 0.f;
        sums[4 * j + i] += value;
        sums[4 * j + 2 + i] += value;
      }
    }
  }

  static __device__ __forceinline__ void put(unsigned char* staging, int row, int column, float a, float b) {
    auto* const target = reinterpret_cast<Out*>(staging + row * C::kPitch) + column;
    if constexpr (std::is_same_v<Out, __nv_bfloat16>) {
      *reinterpret_cast<__nv_bfloat162*>(target) = __floats2bfloat162_rn(a, b);
    } else if constexpr (std::is_same_v<Out, __half>) {
      *reinterpret_cast<__half2*>(target) = __floats2half2_rn(a, b);
    } else {
      *reinterpret_cast<float2*>(target) = {a, b};
    }
  }
};

}  // namespace epiloq::gemm
