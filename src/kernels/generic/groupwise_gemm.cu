// Fallback groupwise GEMM: one thread per element, no tensor cores.

#include "core/cuda_check.h"
#include "kernels/common/device_code.cuh"
#include "kernels/launch/groupwise_mm.h"

namespace epiloq::ops::groupwise_mm {
namespace {

using gemm::GroupwiseProblem;

// The expert of a row of A, or -1: by position with masked_m, by the first end past it with offs.
__device__ int expert_of(GroupwiseProblem const& p, std::int64_t row) {
  if (p.masked_m != nullptr) {
    int const expert = static_cast<int>(row / p.m);
    return row % p.m < p.masked_m[expert] ? expert : -1;
  }
  if (p.offs == nullptr) return 0;
  for (int expert = 0; expert < p.experts; ++expert) {
    if (row < p.offs[expert]) return expert;
  }
  return -1;
}

__device__ float multiply_add(__nv_fp8_e4m3 a, __nv_fp8_e4m3 b, float sum) {
  return fmaf(static_cast<float>(a), static_cast<float>(b), sum);
}
__device__ int multiply_add(std::int8_t a, std::int8_t b, int sum) { return a * b + sum; }

template <class Element, class Out>
__global__ void generic_kernel(__grid_constant__ GroupwiseProblem const p) {
  pdl_trigger();
  pdl_wait();
  int const n = blockIdx.y * blockDim.x + threadIdx.x;
  std::int64_t const row = blockIdx.x;
  int const expert = expert_of(p, row);
  if (n >= p.n || expert < 0) return;
  auto const* const a = static_cast<Element const*>(p.a) + row * p.stride_a;
  auto const* const b = static_cast<Element const*>(p.b) + (std::int64_t{expert} * p.n + n) * p.stride_b;
  float const* const scale_a = p.scale_a.ptr + (row >> p.scale_a.shift) * p.scale_a.stride_row;
  float const* const scale_b =
      p.scale_b.ptr + std::int64_t{expert} * p.scale_b_expert + (n >> p.scale_b.shift) * p.scale_b.stride_row;
  float sum = 0;
  for (int block = 0, k = 0; k < p.k; ++block) {
    std::conditional_t<std::is_same_v<Element, std::int8_t>, int, float> product = 0;
    for (int const end = k + min(p.depth, p.k - k); k < end; ++k) product = multiply_add(a[k], b[k], product);
    float const weighted = scale_b[block * p.scale_b.stride_k] * static_cast<float>(product);
    sum = fmaf(scale_a[block * p.scale_a.stride_k], weighted, sum);
  }
  if (p.bias != nullptr) sum += static_cast<float>(static_cast<Out const*>(p.bias)[n]);
  static_cast<Out*>(p.d)[row * p.stride_d + n] = static_cast<Out>(sum);
}

template <class Element, class Out>
void launch_typed(GroupwiseProblem const& p, Stream stream) {
  constexpr int kThreads = 128;
  std::int64_t const rows = p.masked_m != nullptr ? std::int64_t{p.experts} * p.m : p.m;
  dim3 const grid(static_cast<unsigned>(rows), (p.n + kThreads - 1) / kThreads);
  cuda_check(launch_pdl(generic_kernel<Element, Out>, grid, kThreads, 0, stream, p), "launching epiloq.groupwise_mm");
}

template <class Element>
void launch_of(GroupwiseProblem const& p, DType out, Stream stream) {
  switch (out) {
    case DType::kFloat16:
      return launch_typed<Element, __half>(p, stream);
    case DType::kBFloat16:
      return launch_typed<Element, __nv_bfloat16>(p, stream);
    default:
      return launch_typed<Element, float>(p, stream);
  }
}

}  // namespace

void launch_generic(GroupwiseProblem const& p, DType element, DType out, int, Stream stream) {
  if (element == DType::kInt8) return launch_of<std::int8_t>(p, out, stream);
  launch_of<__nv_fp8_e4m3>(p, out, stream);
}

}  // namespace epiloq::ops::groupwise_mm
