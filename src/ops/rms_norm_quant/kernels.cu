#include "core/cuda_check.h"
#include "core/quantized_rows.cuh"
#include "ops/rms_norm_quant/kernels.h"

namespace epiloq::ops::rms_norm_quant {
namespace {

__device__ float inverse_rms(Problem const& p, float sum_of_squares) {
  int const count = max(p.out.cols, 1);  // a row without columns has a scale too
  return __frcp_rn(__fsqrt_rn(sum_of_squares / count + p.eps));
}

// The row in registers: one pass.
template <class T, class Format, int kVectors>
__global__ void __launch_bounds__(kMaxThreads) one_pass(__grid_constant__ Problem const p) {
  wait_for_previous_kernel();
  int const row = blockIdx.x, column = threadIdx.x * kVector, step = blockDim.x * kVector;
  T const* const x = static_cast<T const*>(p.x) + row * p.stride_x + column;
  T const* const residual = static_cast<T const*>(p.residual) + row * p.stride_residual + column;
  T* const residual_out = static_cast<T*>(p.residual_out) + row * p.stride_residual_out + column;
  Vector<T> held[kVectors], weight[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) held[v].load_if(column + v * step < p.out.cols, x + v * step);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    weight[v].clear();
    if (column + v * step < p.out.cols) weight[v].load_cached(static_cast<T const*>(p.weight) + column + v * step);
  }
  if (p.residual != nullptr) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (column + v * step < p.out.cols) {
        Vector<T> added;
        added.load(residual + v * step);
        held[v].add(added);
        held[v].store(residual_out + v * step);
      }
    }
  }
  float sum = 0.f, values[kVectors][kVector];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    held[v].widen(values[v]);
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum = __fmaf_rn(values[v][i], values[v][i], sum);
  }
  float const inverse = inverse_rms(p, sum_of_block(sum));
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float factors[kVector];
    held[v].widen(values[v]);
    weight[v].widen(factors);
#pragma unroll
    for (int i = 0; i < kVector; ++i) values[v][i] = values[v][i] * inverse * factors[i];
  }
  quantize_row<Format>(p.out, row, values);
}

template <class T, class Format>
__global__ void __launch_bounds__(kMaxThreads) elements(__grid_constant__ Problem const p) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  int const row = blockIdx.x;
  T const* source = static_cast<T const*>(p.x) + row * p.stride_x;
  if (p.residual != nullptr) {
    T const* const residual = static_cast<T const*>(p.residual) + row * p.stride_residual;
    T* const residual_out = static_cast<T*>(p.residual_out) + row * p.stride_residual_out;
    for (int c = threadIdx.x; c < p.out.cols; c += blockDim.x) {
      residual_out[c] = static_cast<T>(static_cast<float>(source[c]) + static_cast<float>(residual[c]));
    }
    source = residual_out;
    __syncthreads();
  }
  float sum = 0.f;
  for (int c = threadIdx.x; c < p.out.cols; c += blockDim.x) {
    float const value = static_cast<float>(source[c]);
    sum = __fmaf_rn(value, value, sum);
  }
  float const inverse = inverse_rms(p, sum_of_block(sum));
  quantize_elements<Format>(p.out, row, [&](int c) {
    return static_cast<float>(source[c]) * inverse * static_cast<float>(static_cast<T const*>(p.weight)[c]);
  });
}

template <class T, class Format>
void launch_typed(Problem const& p, RowPlan const& plan, Stream stream) {
  constexpr int kMost = sizeof(T) == 2 ? 4 : 2;
  constexpr void (*kKernels[])(Problem) = {elements<T, Format>, one_pass<T, Format, 1>, one_pass<T, Format, 2>,
                                           one_pass<T, Format, kMost>};
  cuda_check(launch_dependent(kKernels[plan.kernel], p.out.rows, plan.threads, 0, stream, p),
             "launching epiloq.rms_norm_quant");
}

template <class T>
void launch_format(Problem const& p, RowPlan const& plan, DType q, Stream stream) {
  (q == DType::kInt8 ? launch_typed<T, Int8> : launch_typed<T, E4M3>)(p, plan, stream);
}

}  // namespace

void launch(Problem const& problem, RowPlan const& plan, DType x, DType q, int device, Stream stream) {
  DeviceGuard const guard(device);
  switch (x) {
    case DType::kFloat16:
      return launch_format<__half>(problem, plan, q, stream);
    case DType::kBFloat16:
      return launch_format<__nv_bfloat16>(problem, plan, q, stream);
    default:
      return launch_format<float>(problem, plan, q, stream);
  }
}

}  // namespace epiloq::ops::rms_norm_quant
