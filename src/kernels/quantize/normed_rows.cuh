#pragma once

// Shared by the RMS norm kernels: loads a row, adds the residual and computes the factor of the norm.

#include "kernels/quantize/quantized_rows.cuh"
#include "problems/quantizers/norm_inputs.h"

namespace epiloq {

__device__ __forceinline__ float inverse_rms(float sum_of_squares, int cols, float eps) {
  int const count = max(cols, 1);  // a row without columns has a scale too
  return __frcp_rn(__fsqrt_rn(sum_of_squares / count + eps));
}

// The row's vectors and the residual's, which are loaded before any is written.
template <class T, int kVectors>
__device__ __forceinline__ void read_row(NormInputs const& in, int cols, int row, Vector<T> (&x)[kVectors]) {
  int const column = threadIdx.x * kVector, step = blockDim.x * kVector;
  T const* const source = static_cast<T const*>(in.x) + row * in.stride_x + column;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) x[v].load_if(column + v * step < cols, source + v * step);
  pdl_trigger_if_few();
  if (in.residual == nullptr) return;
  T const* const residual = static_cast<T const*>(in.residual) + row * in.stride_residual + column;
  T* const residual_out = static_cast<T*>(in.residual_out) + row * in.stride_residual_out + column;
  Vector<T> added[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) added[v].load_if(column + v * step < cols, residual + v * step);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    x[v].add(added[v]);
    if (column + v * step < cols) x[v].store(residual_out + v * step);
  }
}

// The same in any layout: the row to norm, which all threads may read, and the thread's part of its sum of squares.
template <class T>
__device__ T const* read_elements(NormInputs const& in, int cols, int row, float& sum_of_squares) {
  T const* source = static_cast<T const*>(in.x) + row * in.stride_x;
  if (in.residual != nullptr) {
    T const* const residual = static_cast<T const*>(in.residual) + row * in.stride_residual;
    T* const residual_out = static_cast<T*>(in.residual_out) + row * in.stride_residual_out;
    for (int c = threadIdx.x; c < cols; c += blockDim.x) {
      residual_out[c] = static_cast<T>(static_cast<float>(source[c]) + static_cast<float>(residual[c]));
    }
    source = residual_out;
    __syncthreads();
  }
  sum_of_squares = 0.f;
  for (int c = threadIdx.x; c < cols; c += blockDim.x) {
    float const value = static_cast<float>(source[c]);
    sum_of_squares = __fmaf_rn(value, value, sum_of_squares);
  }
  return source;
}

}  // namespace epiloq
