// RMSNorm, with an optional residual added first, rounded once to x's dtype. One CTA or one warp per row: one pass over
// rows that fit in registers, otherwise element by element.

#include "core/cuda_check.h"
#include "kernels/quantize/normed_rows.cuh"
#include "kernels/quantize/spread_launch.cuh"
#include "problems/quantizers/rms_norm.h"

namespace epiloq::ops::rms_norm {
namespace {

// Prefetches the vectors of a thread's weights into L2 if there are few rows, whose latency counts. Safe before
// pdl_wait even if a preceding kernel writes the weight, as its writes go to L2.
template <int kVectors, class W>
__device__ __forceinline__ void prefetch_if_few(W const* weights, int column, int step, int cols) {
  constexpr unsigned kFewBlocks = 128;
  if (gridDim.x > kFewBlocks) return;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (column + v * step < cols) asm volatile("prefetch.global.L2 [%0];" ::"l"(weights + v * step));
  }
}

// The row in registers: one pass over memory, one barrier if it has several warps. From two vectors per thread on one
// CTA of kMaxThreads per SM is requested, as for rms_norm_quant.
template <class T, class W, int kVectors>
__global__ void __launch_bounds__(kMaxThreads, kVectors == 1 ? 0 : 1) one_pass(__grid_constant__ Problem const p) {
  int const row = own_row(), column = threadIdx.x * kVector, step = blockDim.x * kVector;
  W const* const weights = static_cast<W const*>(p.in.weight) + column;
  prefetch_if_few<kVectors>(weights, column, step, p.cols);
  pdl_trigger_if_few();  // before its own wait, so that the following product loads weights while the previous one ends
  pdl_wait();
  if (row >= p.rows) return;
  // Issued before the row's loads, so that none waits for another; four vectors would not fit the registers of SM80.
  constexpr bool kHoldsWeight = kVectors < 4;
  Vector<W> weight[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors && kHoldsWeight; ++v) {
    weight[v].clear();
    if (column + v * step < p.cols) weight[v].load_cached(weights + v * step);
  }
  Vector<T> x[kVectors];
  read_row(p.in, p.cols, row, x);
  float sum = 0.f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float values[kVector];
    x[v].widen(values);
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum = __fmaf_rn(values[i], values[i], sum);
  }
  pdl_trigger();
  float const inverse = inverse_rms(sum_of_row(sum), p.cols, p.in.eps);
  T* const out = static_cast<T*>(p.out) + row * p.stride_out + column;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (column + v * step >= p.cols) continue;
    if (!kHoldsWeight) weight[v].load_cached(weights + v * step);
    float values[kVector], factors[kVector];
    x[v].widen(values);
    weight[v].widen(factors);
    Vector<T> y;
#pragma unroll
    for (int i = 0; i < kVector; ++i) y.values[i] = static_cast<T>(values[i] * inverse * factors[i]);
    y.store(out + v * step);
  }
}

template <class T, class W>
__global__ void __launch_bounds__(kMaxThreads) elements(__grid_constant__ Problem const p) {
  pdl_wait();
  pdl_trigger();
  int const row = blockIdx.x;
  float sum;
  T const* const source = read_elements<T>(p.in, p.cols, row, sum);
  float const inverse = inverse_rms(sum_of_block(sum), p.cols, p.in.eps);
  T* const out = static_cast<T*>(p.out) + row * p.stride_out;
  for (int c = threadIdx.x; c < p.cols; c += blockDim.x) {
    float const factor = static_cast<float>(static_cast<W const*>(p.in.weight)[c]);
    out[c] = static_cast<T>(static_cast<float>(source[c]) * inverse * factor);
  }
}

template <class T, class W>
void launch_typed(Problem const& p, RowPlan const& plan, Stream stream) {
  constexpr int kMost = sizeof(T) == 2 && sizeof(W) == 2 ? 4 : 2;  // kernels()
  constexpr void (*kKernels[])(Problem) = {elements<T, W>, one_pass<T, W, 1>, one_pass<T, W, 2>, one_pass<T, W, kMost>};
  dim3 const blocks((p.rows - 1) / plan.rows + 1), threads(plan.threads, plan.rows);
  launch_spread("launching epiloq.rms_norm", kKernels[plan.kernel], blocks, threads, stream, p);
}

template <class T>
void launch_weight(Problem const& p, RowPlan const& plan, DType weight, Stream stream) {
  (weight == DType::kFloat32 ? launch_typed<T, float> : launch_typed<T, T>)(p, plan, stream);
}

}  // namespace

void launch(Problem const& problem, RowPlan const& plan, DType x, DType weight, int device, Stream stream) {
  DeviceGuard const guard(device);
  switch (x) {
    case DType::kFloat16:
      return launch_weight<__half>(problem, plan, weight, stream);
    case DType::kBFloat16:
      return launch_weight<__nv_bfloat16>(problem, plan, weight, stream);
    default:
      return launch_typed<float, float>(problem, plan, stream);
  }
}

}  // namespace epiloq::ops::rms_norm
