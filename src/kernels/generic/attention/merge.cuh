#pragma once

// Merges partial results of attention: of warps, of the CTAs of a cluster, and, by a kernel of its own, of CTAs that
// wrote them to a workspace.

#include "kernels/common/device_code.cuh"
#include "kernels/common/ptx/cta.cuh"
#include "problems/decode_attention.h"

namespace epiloq::ops::decode_attention {

constexpr float kLog2E = 1.44269504f;
constexpr float kRaise = 12.f;  // weights are 2^12 times as large, so that small ones are normal float16 numbers

// Running maximum of the scores (base 2) and sum of the weights, which are relative to 2^(maximum - kRaise).
struct State {
  float maximum, sum, unused[2];
};

// 2^(part - whole) for maxima; the whole's is -infinity as long as all tokens are masked.
__device__ __forceinline__ float weight_of(float part, float whole) {
  return whole == -INFINITY ? 0.f : exp2f(part - whole);
}

// The same for a part that is added: without a maximum its sum is 0 or, of NaNs, NaN.
__device__ __forceinline__ float weight_of_part(float part, float whole) {
  return part == -INFINITY ? 1.f : exp2f(part - whole);
}

// Four elements of a head: numerators and the sum that divides them.
struct Four {
  float4 values;
  float maximum, sum;
};

// `state(i)` and `values(i)` of the parts.
template <class StateOf, class ValuesOf>
__device__ __forceinline__ Four merged(int parts, StateOf state, ValuesOf values) {
  Four whole{{0.f, 0.f, 0.f, 0.f}, -INFINITY, 0.f};
  for (int i = 0; i < parts; ++i) whole.maximum = fmaxf(whole.maximum, state(i).maximum);
  for (int i = 0; i < parts; ++i) {
    State const of_part = state(i);
    float const weight = weight_of_part(of_part.maximum, whole.maximum);
    float4 const four = values(i);
    whole.sum = fmaf(weight, of_part.sum, whole.sum);
    whole.values.x = fmaf(weight, four.x, whole.values.x), whole.values.y = fmaf(weight, four.y, whole.values.y);
    whole.values.z = fmaf(weight, four.z, whole.values.z), whole.values.w = fmaf(weight, four.w, whole.values.w);
  }
  return whole;
}

// With the head's sink, if there are any: one more score in its softmax, of no value.
template <class T>
__device__ __forceinline__ Four with_sink(Four four, void const* sinks, int head) {
  float const sink = sinks == nullptr ? -INFINITY : static_cast<float>(static_cast<T const*>(sinks)[head]) * kLog2E;
  if (sink == -INFINITY) return four;
  float const whole = fmaxf(four.maximum, sink), kept = weight_of_part(four.maximum, whole);
  float4 const values{four.values.x * kept, four.values.y * kept, four.values.z * kept, four.values.w * kept};
  return {values, whole, fmaf(kept, four.sum, exp2f(sink - whole + kRaise))};
}

// If all tokens are masked the result is 0.
template <class T>
__device__ __forceinline__ void store(Four const& four, void* out, std::int64_t element) {
  T* const to = static_cast<T*>(out) + element;
  float const each[] = {four.values.x, four.values.y, four.values.z, four.values.w};
  float const inverse = four.sum == 0.f ? 0.f : 1.f / four.sum;
#pragma unroll
  for (int j = 0; j < 4; ++j) to[j] = static_cast<T>(each[j] * inverse);
}

// Partial results in the workspace: a State and kWidth numerators for each split of each head.
template <int kWidth>
struct Partials {
  State* states;
  float* values;

  __device__ __forceinline__ Partials(float* workspace, std::int64_t rows)
      : states(reinterpret_cast<State*>(workspace)), values(workspace + rows * 4) {}
};

constexpr int kMergeWarps = 8;

template <int kWidth>
struct MergeShared {
  alignas(16) float values[kMergeWarps][kWidth];
  State states[kMergeWarps];
};

// Merges the partial results of a head: warps take splits round-robin, lanes elements.
template <class T, int kWidth>
__global__ __launch_bounds__(32 * kMergeWarps) void merge_kernel(__grid_constant__ Problem const p, int split) {
  constexpr int kPerLane = kWidth / 32, kAtOnce = 4;
  auto& shared = *reinterpret_cast<MergeShared<kWidth>*>(static_cast<unsigned char*>(dynamic_smem));
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  std::int64_t const heads = std::int64_t{gridDim.x} * gridDim.y;
  std::int64_t const head = std::int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
  Partials<kWidth> const partials(p.workspace, heads * split);
  State const* const states = partials.states + head * split;
  float const* const values = partials.values + head * split * kWidth + lane;
  pdl_trigger();  // before its own wait, as in rms_norm.cu
  pdl_wait();
  float maximum = -INFINITY, sum = 0.f, out[kPerLane] = {};
#pragma unroll 1
  for (int first = warp; first < split; first += kMergeWarps * kAtOnce) {
    State state[kAtOnce];
    float part[kAtOnce][kPerLane];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int const at = first + i * kMergeWarps;
      state[i] = at < split ? states[at] : State{-INFINITY, 0.f, {}};
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) part[i][j] = at < split ? values[at * kWidth + j * 32] : 0.f;
    }
    float whole = maximum;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) whole = fmaxf(whole, state[i].maximum);
    float const kept = weight_of(maximum, whole);
    maximum = whole, sum *= kept;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) out[j] *= kept;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      float const weight = weight_of_part(state[i].maximum, whole);
      sum = fmaf(weight, state[i].sum, sum);
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) out[j] = fmaf(weight, part[i][j], out[j]);
    }
  }
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) shared.values[warp][j * 32 + lane] = out[j];
  if (lane == 0) shared.states[warp] = {maximum, sum, {}};
  __syncthreads();
  for (int i = threadIdx.x; i < kWidth / 4; i += 32 * kMergeWarps) {
    Four const four = merged(
        kMergeWarps, [&](int of) { return shared.states[of]; },
        [&](int of) { return *reinterpret_cast<float4 const*>(&shared.values[of][4 * i]); });
    store<T>(with_sink<T>(four, p.sinks, blockIdx.x), p.out, head * kWidth + 4 * i);
  }
}

}  // namespace epiloq::ops::decode_attention
