#pragma once

// Tail of kernels that compute a row in FP32 and quantise it: one CTA per row, or one warp.

#include "kernels/common/device_code.cuh"
#include "kernels/quantize/quantize.cuh"
#include "problems/quantizers/quantized_rows.h"

namespace epiloq {

// The row of these threads (one threadIdx.y); it may be past the last.
__device__ __forceinline__ int own_row() { return static_cast<int>(blockIdx.x * blockDim.y + threadIdx.y); }
__device__ __forceinline__ bool is_one_warp() { return blockDim.x == 32; }

// Over a row, like largest_of_block.
__device__ __forceinline__ float largest_of_row(float magnitude) {
  return is_one_warp() ? largest_of_warp(magnitude) : largest_of_block(magnitude);
}

// In a fixed order, so that results are reproducible.
__device__ __forceinline__ float sum_of_warp(float part) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) part += __shfl_xor_sync(~0u, part, offset);
  return part;
}
// Like largest_of_block, with its own shared memory.
__device__ __forceinline__ float sum_of_block(float value) {
  __shared__ float of_warp[kMaxThreads / 32];
  value = sum_of_warp(value);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  return sum_of_warp(threadIdx.x % 32 < blockDim.x / 32 ? of_warp[threadIdx.x % 32] : 0.f);
}

// Over a row, like sum_of_block.
__device__ __forceinline__ float sum_of_row(float part) {
  return is_one_warp() ? sum_of_warp(part) : sum_of_block(part);
}

// The largest of `lanes` neighbours, a power of two from kVectors on, for each of kVectors vectors: lane l gets that of
// vector l % kVectors. Each step halves the vectors per lane, so all take hardly more exchanges than one.
template <int kVectors>
__device__ __forceinline__ float largest_of_tiles(float (&amax)[kVectors], int lanes) {
#pragma unroll
  for (int half = kVectors / 2; half > 0; half /= 2) {
    bool const upper = threadIdx.x & half;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      float const kept = upper ? amax[half + i] : amax[i], sent = upper ? amax[i] : amax[half + i];
      amax[i] = max_nan(kept, __shfl_xor_sync(~0u, sent, half));
    }
  }
  for (int offset = kVectors; offset < lanes; offset *= 2) {
    amax[0] = max_nan(amax[0], __shfl_xor_sync(~0u, amax[0], offset));
  }
  return amax[0];
}

// Of `lanes` neighbours.
__device__ __forceinline__ Divisor from_lane(Divisor const& divisor, int lane, int lanes) {
  return {__shfl_sync(~0u, divisor.scale, lane, lanes), __shfl_sync(~0u, divisor.inverse, lane, lanes),
          divisor.in_range};
}

template <class Format>
__device__ __forceinline__ Divisor measured(QuantizedRows const& p, int row, int tile, float amax, bool writes) {
  float const scale = scale_of(amax, Format::kMax, p.rule);
  if (writes) p.scale[row * p.scale_row + tile * p.scale_col] = scale;
  return divide_by(scale);
}

// values[v] are the columns from (v * blockDim.x + threadIdx.x) * 8 on; 0 past the row's end.
template <class Format, int kVectors>
__device__ __forceinline__ void quantize_row(QuantizedRows const& p, int row, float (&values)[kVectors][kVector]) {
  static_assert(kVectors <= kFewestLanes);
  int const column = threadIdx.x * kVector, step = blockDim.x * kVector;
  float amax[kVectors], of_row = 0.f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    amax[v] = fabsf(values[v][0]);
#pragma unroll
    for (int i = 1; i < kVector; ++i) amax[v] = max_nan(amax[v], fabsf(values[v][i]));
    of_row = max_nan(of_row, amax[v]);
  }
  pdl_trigger();
  Divisor divisor{};
  bool const by_row = p.lanes == 0;
  if (by_row) {
    // Rows without columns have no groups, and so no scale to write.
    divisor = measured<Format>(p, row, 0, largest_of_row(of_row), threadIdx.x == 0 && p.tiles > 0);
  } else {
    // One division per thread, for one of its vectors.
    int const v = threadIdx.x % kVectors, tile = (column + v * step) >> (__ffs(p.tile_cols) - 1);  // a power of two
    bool const writes = (threadIdx.x & (p.lanes - 1)) < kVectors && tile < p.tiles;
    divisor = measured<Format>(p, row, tile, largest_of_tiles(amax, p.lanes), writes);
    divisor.in_range = __all_sync(~0u, divisor.in_range);  // one branch for the warp: all vectors divide, or none does
  }
  std::uint8_t* const q = p.q + row * p.stride_q;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    int const c = column + v * step;
    Divisor const of_vector = by_row ? divisor : from_lane(divisor, v, p.lanes);
    if (c < p.cols) {
      *reinterpret_cast<uint2*>(q + c) = quantize<Format, 1, true>(values[v], of_vector);
    } else if (c < p.padded_cols) {
      *reinterpret_cast<uint2*>(q + c) = {};
    }
  }
  for (int c = column + kVectors * step; c < p.padded_cols; c += step) *reinterpret_cast<uint2*>(q + c) = {};
}

// The same for rows in any layout: `value(column)` is computed twice, in loops unrolled kUnroll times.
template <class Format, int kUnroll = 4, class Value>
__device__ void quantize_elements(QuantizedRows const& p, int row, Value value) {
  std::uint8_t* const q = p.q + row * p.stride_q;
  auto const largest = [&](int begin, int end, int first, int step) {
    float amax = 0.f;
#pragma unroll kUnroll
    for (int c = begin + first; c < end; c += step) amax = max_nan(amax, fabsf(value(c)));
    return amax;
  };
  auto const store = [&](int begin, int end, int first, int step, float scale) {
#pragma unroll kUnroll
    for (int c = begin + first; c < end; c += step) {
      q[c] = static_cast<std::uint8_t>(pack<Format>(__fdiv_rn(value(c), scale), 0.f, 0.f, 0.f));
    }
  };
  if (p.tiles == 1) {
    float const amax = largest_of_row(largest(0, p.cols, threadIdx.x, blockDim.x));
    float const scale = measured<Format>(p, row, 0, amax, threadIdx.x == 0).scale;
    store(0, p.cols, threadIdx.x, blockDim.x, scale);
  } else {
    int const lane = threadIdx.x % 32;
    for (int tile = threadIdx.x / 32; tile < p.tiles; tile += blockDim.x / 32) {
      int const begin = tile * p.tile_cols, end = min(p.tile_cols, p.cols - begin) + begin;
      float const amax = largest_of(largest(begin, end, lane, 32), 32);
      store(begin, end, lane, 32, measured<Format>(p, row, tile, amax, lane == 0).scale);
    }
  }
  for (int c = p.cols + threadIdx.x; c < p.padded_cols; c += blockDim.x) q[c] = 0;
}

}  // namespace epiloq
