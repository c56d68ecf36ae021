// A router's logits for a few tokens: a warp multiplies one expert's row of the weight by up to kTokens tokens. (cuBLAS
// gives the few experts to one or two CTAs.)

#include "core/cuda_check.h"
#include "epiloq/device.h"
#include "kernels/quantize/quantize.cuh"
#include "problems/experts/expert_routing.h"

namespace epiloq::ops::expert_routing {
namespace {

constexpr int kWarp = 32, kWarps = 4;  // per CTA

template <int kTokens, class T, class Out>
__global__ __launch_bounds__(kWarp* kWarps) void logits_kernel(__grid_constant__ LogitsProblem const p) {
  pdl_wait();
  pdl_trigger();
  int const lane = threadIdx.x % kWarp, expert = blockIdx.x * kWarps + threadIdx.x / kWarp;
  int const first = blockIdx.y * kTokens, tokens = min(kTokens, p.tokens - first);
  if (expert >= p.experts) return;
  T const* const weights = static_cast<T const*>(p.weight) + expert * p.stride_weight;
  T const* const x = static_cast<T const*>(p.x) + first * p.stride_x;
  float sums[kTokens] = {};
#pragma unroll 4
  for (int column = lane * kVector; column < p.depth; column += kWarp * kVector) {
    Vector<T> loaded;
    loaded.load_cached(weights + column);
    float weight[kVector];
    loaded.widen(weight);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (t >= tokens) break;
      Vector<T> token;
      token.load_cached(x + t * p.stride_x + column);
      float values[kVector];
      token.widen(values);
#pragma unroll
      for (int i = 0; i < kVector; ++i) sums[t] = fmaf(values[i], weight[i], sums[t]);
    }
  }
  float const bias = p.bias == nullptr ? 0.f : static_cast<float>(static_cast<T const*>(p.bias)[expert]);
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    for (int offset = kWarp / 2; offset > 0; offset /= 2) sums[t] += __shfl_xor_sync(~0u, sums[t], offset);
    if (lane == 0 && t < tokens) {
      static_cast<Out*>(p.logits)[std::int64_t{first + t} * p.experts + expert] = static_cast<Out>(sums[t] + bias);
    }
  }
}

template <class T, class Out>
void launch_typed(LogitsProblem const& p, Stream stream) {
  int const per_warp = p.tokens <= 1 ? 1 : p.tokens <= 4 ? 4 : 8;
  dim3 const grid(static_cast<unsigned>((p.experts + kWarps - 1) / kWarps),
                  static_cast<unsigned>((p.tokens + per_warp - 1) / per_warp));
  auto* const kernel = per_warp == 1   ? &logits_kernel<1, T, Out>
                       : per_warp == 4 ? &logits_kernel<4, T, Out>
                                       : &logits_kernel<8, T, Out>;
  cuda_check(launch_pdl(kernel, grid, kWarp * kWarps, 0, stream, p), "launching epiloq.expert_logits");
}

template <class T>
void launch_inputs(LogitsProblem const& p, DType logits, Stream stream) {
  return logits == DType::kFloat32 ? launch_typed<T, float>(p, stream) : launch_typed<T, T>(p, stream);
}

}  // namespace

void launch_logits(LogitsProblem const& p, DType x, DType logits, int device, Stream stream) {
  DeviceGuard const guard(device);
  if (x == DType::kFloat16) return launch_inputs<__half>(p, logits, stream);
  launch_inputs<__nv_bfloat16>(p, logits, stream);
}

}  // namespace epiloq::ops::expert_routing
