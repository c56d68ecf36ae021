// silu(gate) * up, or another gate, rounded once to x's dtype. Rows are divided among CTAs, so that a few of them use
// many SMs.

#include <algorithm>
#include <limits>

#include "core/cuda_check.h"
#include "kernels/quantize/gated.cuh"
#include "kernels/quantize/quantize.cuh"
#include "kernels/quantize/spread_launch.cuh"
#include "problems/quantizers/silu_and_mul.h"

namespace epiloq::ops::silu_and_mul {
namespace {

constexpr int kThreads = 256;

// CTA blockIdx.x has part blockIdx.x % parts of blockDim.y rows. Of its columns a thread computes every
// (parts * blockDim.x)-th group of kWidth, until the row's end. `compute` gets kWidth gates and kWidth factors, which
// alternate in interleaved rows, in the 2 kWidth columns from the first pointer on.
template <class T, int kWidth, class Compute>
__device__ __forceinline__ void for_own_columns(Problem const& p, int parts, bool interleaved, Compute compute) {
  int const part = blockIdx.x % parts, row = static_cast<int>(blockIdx.x / parts * blockDim.y + threadIdx.y);
  if (row >= p.rows) return;
  T const* const x = static_cast<T const*>(p.x) + row * p.stride_x;
  T* const out = static_cast<T*>(p.out) + row * p.stride_out;
  int const step = parts * blockDim.x * kWidth;
  for (int c = (part * blockDim.x + threadIdx.x) * kWidth; c < p.cols; c += step) {
    T const* const first = x + (interleaved ? 2 * std::int64_t{c} : c);
    compute(first, first + (interleaved ? kWidth : p.cols), out + c);
  }
}

template <class T, bool kInterleaved, bool kIsSilu>
__global__ void __launch_bounds__(kThreads) vectors(__grid_constant__ Problem const p, int parts) {
  pdl_trigger_if_few();  // before its own wait, as in rms_norm.cu
  pdl_wait();
  for_own_columns<T, kVector>(p, parts, kInterleaved, [&p](T const* first, T const* second, T* out) {
    Vector<T> one, other;
    if (kInterleaved) {  // each a half of the same 32-byte sectors, which L1 reads once
      one.load_cached(first);
      other.load_cached(second);
    } else {
      one.load(first);
      other.load(second);
    }
    float both[2][kVector], values[kVector], factors[kVector];
    one.widen(both[0]);
    other.widen(both[1]);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      int const pair = kInterleaved ? 2 * i % kVector : i;
      values[i] = both[kInterleaved ? 2 * i / kVector : 0][pair];
      factors[i] = both[kInterleaved ? 2 * i / kVector : 1][pair + kInterleaved];
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      one.values[i] = static_cast<T>(combined<kIsSilu>(p.gate, values[i], factors[i]));
    }
    one.store(out);
  });
}

template <class T>
__global__ void __launch_bounds__(kThreads) elements(__grid_constant__ Problem const p, int parts) {
  pdl_wait();
  pdl_trigger_if_few();
  for_own_columns<T, 1>(p, parts, p.interleaved, [&p](T const* gate, T const* up, T* out) {
    *out = static_cast<T>(combined<false>(p.gate, static_cast<float>(*gate), static_cast<float>(*up)));
  });
}

template <class T>
void launch_typed(Problem const& p, bool in_vectors, Stream stream) {
  constexpr int kWarp = 32, kMaxBlocks = std::numeric_limits<int>::max();
  int const groups = in_vectors ? p.cols / kVector : p.cols;
  int const across = std::min(kThreads, (groups - 1) / kWarp * kWarp + kWarp), down = kThreads / across;
  int const row_blocks = (p.rows - 1) / down + 1;
  int const parts = std::min((groups - 1) / across + 1, kMaxBlocks / row_blocks);
  auto const kernel = !in_vectors        ? elements<T>
                      : p.interleaved    ? vectors<T, true, false>
                      : p.gate.is_silu() ? vectors<T, false, true>
                                         : vectors<T, false, false>;
  launch_spread("launching epiloq.silu_and_mul", kernel, dim3(row_blocks * parts), dim3(across, down), stream, p,
                parts);
}

}  // namespace

void launch(Problem const& problem, bool in_vectors, DType x, int device, Stream stream) {
  DeviceGuard const guard(device);
  switch (x) {
    case DType::kFloat16:
      return launch_typed<__half>(problem, in_vectors, stream);
    case DType::kBFloat16:
      return launch_typed<__nv_bfloat16>(problem, in_vectors, stream);
    default:
      return launch_typed<float>(problem, in_vectors, stream);
  }
}

}  // namespace epiloq::ops::silu_and_mul
