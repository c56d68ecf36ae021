// A router's choice of experts. A warp has a token; lane l of it the experts l, l + 32, ….

#include <cfloat>

#include "core/cuda_check.h"
#include "epiloq/device.h"
#include "kernels/common/device_code.cuh"
#include "problems/experts/expert_routing.h"

namespace epiloq::ops::expert_routing {
namespace {

constexpr int kWarp = 32, kWarps = 4;  // per CTA
constexpr unsigned kAll = ~0u;

__device__ __forceinline__ unsigned largest_of_warp(unsigned value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kAll, value);
#else
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value = max(value, __shfl_xor_sync(kAll, value, offset));
  return value;
#endif
}

__device__ __forceinline__ float sum_of_warp(float value) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kAll, value, offset);
  return value;
}

// Integers that order as floats do, NaN last; 0 is no float's but that of a NaN with its sign set.
__device__ __forceinline__ unsigned ordered(float value) {
  unsigned const bits = __float_as_uint(value);
  return bits >> 31 ? ~bits : bits | 1u << 31;
}
__device__ __forceinline__ float from_ordered(unsigned key) {
  return __uint_as_float(key >> 31 ? key & ~(1u << 31) : ~key);
}

__device__ __forceinline__ float largest_of_warp(float value) { return from_ordered(largest_of_warp(ordered(value))); }

constexpr unsigned kTaken = 0, kExcluded = 1;  // keys below those of all numbers

// The keys of a warp's experts.
template <int kPerLane>
struct Keys {
  unsigned of[kPerLane];

  // Takes the expert with the largest key, of equal ones the first; returns its key and its number.
  __device__ __forceinline__ unsigned take_largest(int lane, int& expert) {
    unsigned largest = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) largest = max(largest, of[i]);
    unsigned const key = largest_of_warp(largest);
    int first = kPerLane;  // of the lane's experts
#pragma unroll
    for (int i = kPerLane - 1; i >= 0; --i) first = of[i] == key ? i : first;
    // The smallest number is that with the largest complement.
    unsigned const complement = first < kPerLane ? ~static_cast<unsigned>(first * kWarp + lane) : 0;
    expert = static_cast<int>(~largest_of_warp(complement));
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) of[i] = i * kWarp + lane == expert ? kTaken : of[i];
    return key;
  }
};

// Excludes the experts of all but the best groups.
template <int kPerLane>
__device__ void exclude_groups(Keys<kPerLane>& keys, SelectProblem const& p, int lane) {
  int const size = p.experts / p.groups;
  Keys<1> group_keys{{kTaken}};  // lane g has group g
  for (int g = 0; g < p.groups; ++g) {
    Keys<kPerLane> of_group;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) of_group.of[i] = (i * kWarp + lane) / size == g ? keys.of[i] : kTaken;
    float sum = 0;
    for (int j = 0; j < p.group_scores; ++j) {
      int expert;
      sum += from_ordered(of_group.take_largest(lane, expert));
    }
    if (lane == g) group_keys.of[0] = max(ordered(sum), kExcluded);
  }
  unsigned kept = 0;  // bit g: group g
  for (int j = 0; j < p.top_groups; ++j) {
    int group;
    group_keys.take_largest(lane, group);
    kept |= 1u << group;
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    int const expert = i * kWarp + lane;
    if (expert < p.experts && !(kept >> expert / size & 1)) keys.of[i] = kExcluded;
  }
}

template <int kPerLane, class Logit, class Weight>
__global__ __launch_bounds__(kWarp* kWarps) void select_kernel(__grid_constant__ SelectProblem const p) {
  pdl_wait();
  pdl_trigger();
  int const token = blockIdx.x * kWarps + threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (token >= p.tokens) return;
  Logit const* const logits = static_cast<Logit const*>(p.logits) + token * p.stride_logits;
  float scores[kPerLane];
  float largest = -FLT_MAX;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    int const expert = i * kWarp + lane;
    scores[i] = expert < p.experts ? static_cast<float>(logits[expert]) : -__builtin_inff();
    largest = fmaxf(largest, scores[i]);
  }
  if (p.score == ExpertScore::kSoftmax) {
    largest = largest_of_warp(largest);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) sum += scores[i] = expf(scores[i] - largest);
    sum = sum_of_warp(sum);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) scores[i] /= sum;
  } else if (p.score == ExpertScore::kSigmoid) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) scores[i] = 1.f / (1.f + expf(-scores[i]));
  }
  Keys<kPerLane> keys;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    int const expert = i * kWarp + lane;
    float const score = p.bias != nullptr && expert < p.experts ? scores[i] + p.bias[expert] : scores[i];
    keys.of[i] = expert < p.experts ? max(ordered(score), kExcluded) : kTaken;
  }
  if (p.groups > 1) exclude_groups(keys, p, lane);

  // Lane j has the j-th choice.
  int chosen = 0;
  float weight = -__builtin_inff();
  for (int j = 0; j < p.top_k; ++j) {
    int expert;
    keys.take_largest(lane, expert);
    float score = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) score = i * kWarp + lane == expert ? scores[i] : score;
    score = __shfl_sync(kAll, score, expert % kWarp);
    if (lane == j) chosen = expert, weight = score;
  }
  if (p.score == ExpertScore::kSoftmaxOfChosen) {
    weight = expf(weight - largest_of_warp(weight));
    weight /= sum_of_warp(weight);
  }
  if (p.normalize) weight /= sum_of_warp(lane < p.top_k ? weight : 0.f) + p.epsilon;
  if (lane < p.top_k) {
    std::int64_t const at = std::int64_t{token} * p.top_k + lane;
    p.chosen[at] = chosen;
    static_cast<Weight*>(p.weights)[at] = static_cast<Weight>(weight * p.factor);
  }
}

template <class Logit, class Weight>
auto kernel_for(int experts) {
  return experts <= 4 * kWarp    ? &select_kernel<4, Logit, Weight>
         : experts <= 8 * kWarp  ? &select_kernel<8, Logit, Weight>
         : experts <= 16 * kWarp ? &select_kernel<16, Logit, Weight>
                                 : &select_kernel<kMostExperts / kWarp, Logit, Weight>;
}

// Weights have the type of logits, or float32.
template <class Logit>
auto kernel_for(int experts, DType weights) {
  return weights == DType::kFloat32 ? kernel_for<Logit, float>(experts) : kernel_for<Logit, Logit>(experts);
}

}  // namespace

void launch_select(SelectProblem const& p, DType logits, DType weights, int device, Stream stream) {
  DeviceGuard const guard(device);
  auto* const kernel = logits == DType::kFloat16    ? kernel_for<__half>(p.experts, weights)
                       : logits == DType::kBFloat16 ? kernel_for<__nv_bfloat16>(p.experts, weights)
                                                    : kernel_for<float>(p.experts, weights);
  dim3 const grid(static_cast<unsigned>((p.tokens + kWarps - 1) / kWarps));
  cuda_check(launch_pdl(kernel, grid, kWarp * kWarps, 0, stream, p), "launching epiloq.select_experts");
}

}  // namespace epiloq::ops::expert_routing
