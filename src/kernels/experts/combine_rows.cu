// The weighted sum of each token's rows. A thread has kWidth columns of a token.

#include <cstdint>

#include "core/cuda_check.h"
#include "epiloq/device.h"
#include "kernels/quantize/quantize.cuh"
#include "problems/experts/expert_routing.h"

namespace epiloq::ops::expert_routing {
namespace {

constexpr int kThreads = 128;
constexpr int kInFlight = 8;  // rows that a thread loads at a time

template <class T, int kWidth>
__device__ __forceinline__ void load(float (&to)[kWidth], T const* from) {
  if constexpr (kWidth == kVector) {
    Vector<T> loaded;
    loaded.load(from);
    loaded.widen(to);
  } else {
    to[0] = static_cast<float>(*from);
  }
}

template <class T, class Weight, int kWidth>
__global__ __launch_bounds__(kThreads) void combine_kernel(__grid_constant__ CombineProblem const p) {
  pdl_wait();
  pdl_trigger();
  int const token = blockIdx.x, column = (blockIdx.y * kThreads + threadIdx.x) * kWidth;
  if (column >= p.width) return;
  std::int64_t const first = std::int64_t{token} * p.top_k, count = p.count == nullptr ? INT32_MAX : *p.count;
  float sum[kWidth] = {};
  for (int begin = 0; begin < p.top_k; begin += kInFlight) {
    float values[kInFlight][kWidth] = {}, weights[kInFlight] = {};
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (begin + j >= p.top_k) break;
      std::int64_t const place = p.places[first + begin + j];
      if (place >= count) continue;
      load(values[j], static_cast<T const*>(p.rows) + place * p.stride_rows + column);
      weights[j] = static_cast<float>(static_cast<Weight const*>(p.weights)[first + begin + j]);
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum[i] = fmaf(weights[j], values[j][i], sum[i]);
    }
  }
  T* const out = static_cast<T*>(p.out) + std::int64_t{token} * p.width + column;
  if constexpr (kWidth == kVector) {
    Vector<T> rounded;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) rounded.values[i] = static_cast<T>(sum[i]);
    rounded.store(out);
  } else {
    *out = static_cast<T>(sum[0]);
  }
}

template <class T, class Weight>
void launch_typed(CombineProblem const& p, bool in_vectors, Stream stream) {
  int const threads = in_vectors ? p.width / kVector : p.width;
  dim3 const grid(static_cast<unsigned>(p.tokens), static_cast<unsigned>((threads + kThreads - 1) / kThreads));
  auto* const kernel = in_vectors ? &combine_kernel<T, Weight, kVector> : &combine_kernel<T, Weight, 1>;
  cuda_check(launch_pdl(kernel, grid, kThreads, 0, stream, p), "launching epiloq.combine_expert_rows");
}

// Weights have the type of rows, or float32.
template <class T>
void launch_rows(CombineProblem const& p, bool in_vectors, DType weights, Stream stream) {
  return weights == DType::kFloat32 ? launch_typed<T, float>(p, in_vectors, stream)
                                    : launch_typed<T, T>(p, in_vectors, stream);
}

}  // namespace

void launch_combine(CombineProblem const& p, bool in_vectors, DType rows, DType weights, int device, Stream stream) {
  DeviceGuard const guard(device);
  switch (rows) {
    case DType::kFloat16:
      return launch_rows<__half>(p, in_vectors, weights, stream);
    case DType::kBFloat16:
      return launch_rows<__nv_bfloat16>(p, in_vectors, weights, stream);
    default:
      return launch_rows<float>(p, in_vectors, weights, stream);
  }
}

}  // namespace epiloq::ops::expert_routing
