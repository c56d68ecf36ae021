// RMSNorm, with an optional residual added first, quantised to int8 or FP8 with a measured scale per row or group. One
// CTA or one warp per row: one pass over rows that fit in registers, otherwise element by element.

#include "core/cuda_check.h"
#include "kernels/quantize/normed_rows.cuh"
#include "kernels/quantize/spread_launch.cuh"
#include "problems/quantizers/rms_norm_quant.h"

namespace epiloq::ops::rms_norm_quant {
namespace {

template <class Format, int kUnroll, class T>
__device__ __forceinline__ void quantize_normed(Problem const& p, int row, T const* source, float inverse) {
  quantize_elements<Format, kUnroll>(p.out, row, [&](int c) {
    return static_cast<float>(source[c]) * inverse * static_cast<float>(static_cast<T const*>(p.in.weight)[c]);
  });
}

// Magnitudes of x * weight, and of the inverse, whose products and quotients stay within float32. A product below
// 2^-150, which became 0, is a norm below 2^-136: 0 at any scale.
__device__ bool holds(float amax) { return amax == 0.f || (amax >= 0x1p-100f && amax <= 0x1p60f); }
__device__ bool is_moderate(float inverse) { return inverse >= 0x1p-60f && inverse <= 0x1p14f; }

// The slow path, from memory again, in no more registers than the kernel has without it.
template <class T, class Format>
__device__ __forceinline__ void quantize_again(Problem const& p, int row, float inverse) {
  bool const adds = p.in.residual != nullptr;
  void const* const rows = adds ? p.in.residual_out : p.in.x;
  std::int64_t const stride = adds ? p.in.stride_residual_out : p.in.stride_x;
  quantize_normed<Format, 1>(p, row, static_cast<T const*>(rows) + row * stride, inverse);
}

// Partial results of a row's threads, reduced at one barrier if there are several warps.
struct RowParts {
  float sum_of_squares, amax;
  bool all_hold;
};
__device__ __forceinline__ RowParts of_row(RowParts part) {
  __shared__ float2 of_warp[kMaxThreads / 32];
  part.sum_of_squares = sum_of_warp(part.sum_of_squares);
  part.amax = largest_of_warp(part.amax);
  if (is_one_warp()) {
    __syncwarp();  // before others' residuals are read again; a vote orders no memory
    return {part.sum_of_squares, part.amax, __all_sync(~0u, part.all_hold) != 0};
  }
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = {part.sum_of_squares, part.amax};
  bool const all_hold = __syncthreads_and(part.all_hold);
  float2 const other = threadIdx.x % 32 < blockDim.x / 32 ? of_warp[threadIdx.x % 32] : float2{};
  return {sum_of_warp(other.x), largest_of_warp(other.y), all_hold};
}

// The row in registers: one pass over memory, one barrier if it has several warps. The norm is not known until the sum
// is, so x * weight is measured and kept, and multiplied by inverse / scale at the end. From two vectors per thread on
// one CTA of kMaxThreads per SM is requested: left alone, ptxas targets two and spills on SM80.
template <class T, class Format, int kVectors>
__global__ void __launch_bounds__(kMaxThreads, kVectors == 1 ? 0 : 1) one_pass(__grid_constant__ Problem const p) {
  pdl_wait();
  int const row = own_row(), column = threadIdx.x * kVector, step = blockDim.x * kVector;
  QuantizedRows const& out = p.out;
  if (row >= out.rows) return;
  T const* const weights = static_cast<T const*>(p.in.weight) + column;
  Vector<T> held[kVectors];
  read_row(p.in, out.cols, row, held);
  float sum = 0.f, products[kVectors][kVector], amax[kVectors], largest_own = 0.f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    Vector<T> weight;
    weight.clear();
    if (column + v * step < out.cols) weight.load_cached(weights + v * step);
    float values[kVector];
    held[v].widen(values);
    weight.widen(products[v]);
    amax[v] = 0.f;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      sum = __fmaf_rn(values[i], values[i], sum);
      products[v][i] *= values[i];
      amax[v] = max_nan(amax[v], fabsf(products[v][i]));
    }
    largest_own = max_nan(largest_own, amax[v]);
  }
  pdl_trigger();
  bool const by_row = out.lanes == 0;
  // One of the thread's vectors stands for its group.
  int const of_vector = threadIdx.x % kVectors;
  float const of_group = by_row ? largest_own : largest_of_tiles(amax, out.lanes);
  RowParts const whole = of_row({sum, largest_own, by_row || holds(of_group)});
  float const inverse = inverse_rms(whole.sum_of_squares, out.cols, p.in.eps);
  if (!whole.all_hold || !holds(whole.amax) || !is_moderate(inverse)) return quantize_again<T, Format>(p, row, inverse);
  int const tile = by_row ? 0 : (column + of_vector * step) >> (__ffs(out.tile_cols) - 1);  // a power of two
  bool const writes = by_row ? threadIdx.x == 0 : (threadIdx.x & (out.lanes - 1)) < kVectors;
  float const largest = by_row ? whole.amax : of_group;
  float const scale = measured<Format>(out, row, tile, largest * inverse, writes && tile < out.tiles).scale;
  float const factor = largest == 0.f ? 0.f : __fdividef(inverse, scale);
  std::uint8_t* const q = out.q + row * out.stride_q;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    int const c = column + v * step;
    float const times = by_row ? factor : __shfl_sync(~0u, factor, v, out.lanes);
    if (c < out.cols) {
      float (&y)[kVector] = products[v];
#pragma unroll
      for (int i = 0; i < kVector; ++i) y[i] *= times;
      *reinterpret_cast<uint2*>(q + c) = {pack<Format>(y[0], y[1], y[2], y[3]), pack<Format>(y[4], y[5], y[6], y[7])};
    } else if (c < out.padded_cols) {
      *reinterpret_cast<uint2*>(q + c) = {};
    }
  }
  for (int c = column + kVectors * step; c < out.padded_cols; c += step) *reinterpret_cast<uint2*>(q + c) = {};
}

template <class T, class Format>
__global__ void __launch_bounds__(kMaxThreads) elements(__grid_constant__ Problem const p) {
  pdl_wait();
  pdl_trigger();
  int const row = blockIdx.x;
  float sum;
  T const* const source = read_elements<T>(p.in, p.out.cols, row, sum);
  float const inverse = inverse_rms(sum_of_block(sum), p.out.cols, p.in.eps);
  quantize_normed<Format, 4>(p, row, source, inverse);
}

template <class T, class Format>
void launch_typed(Problem const& p, RowPlan const& plan, Stream stream) {
  constexpr int kMost = sizeof(T) == 2 ? 4 : 2;
  constexpr void (*kKernels[])(Problem) = {elements<T, Format>, one_pass<T, Format, 1>, one_pass<T, Format, 2>,
                                           one_pass<T, Format, kMost>};
  dim3 const blocks((p.out.rows - 1) / plan.rows + 1), threads(plan.threads, plan.rows);
  launch_spread("launching epiloq.rms_norm_quant", kKernels[plan.kernel], blocks, threads, stream, p);
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
