// silu(gate) * up, or another gate, quantised to int8 or FP8 with a measured scale per row or group. One CTA or one
// warp per row: one pass over rows that fit in registers, otherwise element by element.

#include "core/cuda_check.h"
#include "kernels/quantize/gated.cuh"
#include "kernels/quantize/quantized_rows.cuh"
#include "kernels/quantize/spread_launch.cuh"
#include "problems/quantizers/silu_and_mul_quant.h"

namespace epiloq::ops::silu_and_mul_quant {
namespace {

// The row in registers: one pass.
template <class T, class Format, int kVectors, bool kIsSilu>
__global__ void __launch_bounds__(kMaxThreads) one_pass(__grid_constant__ Problem const p) {
  pdl_wait();
  int const row = own_row(), column = threadIdx.x * kVector, step = blockDim.x * kVector;
  if (row >= p.out.rows) return;
  T const* const gates = static_cast<T const*>(p.x) + row * p.stride_x + column;
  T const* const ups = gates + p.out.cols;
  Vector<T> gate[kVectors], up[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    gate[v].load_if(column + v * step < p.out.cols, gates + v * step);
    up[v].load_if(column + v * step < p.out.cols, ups + v * step);
  }
  float values[kVectors][kVector];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float factors[kVector];
    gate[v].widen(values[v]);
    up[v].widen(factors);
#pragma unroll
    for (int i = 0; i < kVector; ++i) values[v][i] = combined<kIsSilu>(p.gate, values[v][i], factors[i]);
  }
  quantize_row<Format>(p.out, row, values);
}

template <class T, class Format>
__global__ void __launch_bounds__(kMaxThreads, 1) elements(__grid_constant__ Problem const p) {
  pdl_wait();
  pdl_trigger();
  T const* const x = static_cast<T const*>(p.x) + blockIdx.x * p.stride_x;
  quantize_elements<Format>(p.out, blockIdx.x, [&](int c) {
    return combined<false>(p.gate, static_cast<float>(x[c]), static_cast<float>(x[std::int64_t{p.out.cols} + c]));
  });
}

template <class T, class Format>
void launch_typed(Problem const& p, RowPlan const& plan, Stream stream) {
  constexpr void (*kSilu[])(Problem) = {elements<T, Format>, one_pass<T, Format, 1, true>, one_pass<T, Format, 2, true>,
                                        one_pass<T, Format, 4, true>};
  // Other gates are rare: one kernel takes all rows that fit in registers.
  auto const kernel = p.gate.is_silu() || plan.kernel == 0 ? kSilu[plan.kernel] : one_pass<T, Format, 4, false>;
  dim3 const blocks((p.out.rows - 1) / plan.rows + 1), threads(plan.threads, plan.rows);
  launch_spread("launching epiloq.silu_and_mul_quant", kernel, blocks, threads, stream, p);
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

}  // namespace epiloq::ops::silu_and_mul_quant
