// groupwise_mm for what the SM90 kernels refuse, and on other GPUs: an element a thread, without tensor cores.

#include "core/cuda_check.h"
#include "core/device_code.cuh"
#include "ops/groupwise_mm/kernels.h"

namespace epiloq::ops::groupwise_mm {
namespace {

using gemm::GroupwiseProblem;

// The expert that a row of A belongs to, or -1: with masked_m by its position, with offs by the first end past it.
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

template <class Out>
__global__ void generic_kernel(__grid_constant__ GroupwiseProblem const p) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  int const n = blockIdx.y * blockDim.x + threadIdx.x;
  std::int64_t const row = blockIdx.x;
  int const expert = expert_of(p, row);
  if (n >= p.n || expert < 0) return;
  auto const* const a = static_cast<__nv_fp8_e4m3 const*>(p.a) + row * p.stride_a;
  auto const* const b = static_cast<__nv_fp8_e4m3 const*>(p.b) + (std::int64_t{expert} * p.n + n) * p.stride_b;
  float const* const scale_a = p.scale_a.ptr + (row >> p.scale_a.shift) * p.scale_a.stride_row;
  float const* const scale_b =
      p.scale_b.ptr + std::int64_t{expert} * p.scale_b_expert + (n >> p.scale_b.shift) * p.scale_b.stride_row;
  float sum = 0;
  for (int block = 0; block * gemm::kGroupDepth < p.k; ++block) {
    float product = 0;
    int const end = min((block + 1) * gemm::kGroupDepth, p.k);
    for (int k = block * gemm::kGroupDepth; k < end; ++k) {
      product = fmaf(static_cast<float>(a[k]), static_cast<float>(b[k]), product);
    }
    sum = fmaf(scale_a[block * p.scale_a.stride_k] * scale_b[block * p.scale_b.stride_k], product, sum);
  }
  if (p.bias != nullptr) sum += static_cast<float>(static_cast<Out const*>(p.bias)[n]);
  static_cast<Out*>(p.d)[row * p.stride_d + n] = static_cast<Out>(sum);
}

template <class Out>
void launch_typed(GroupwiseProblem const& p, Stream stream) {
  constexpr int kThreads = 128;
  std::int64_t const rows = p.masked_m != nullptr ? std::int64_t{p.experts} * p.m : p.m;
  dim3 const grid(static_cast<unsigned>(rows), (p.n + kThreads - 1) / kThreads);
  cuda_check(launch_dependent(generic_kernel<Out>, grid, kThreads, 0, stream, p), "launching epiloq.groupwise_mm");
}

}  // namespace

void launch_generic(GroupwiseProblem const& p, DType out, int, Stream stream) {
  switch (out) {
    case DType::kFloat16:
      return launch_typed<__half>(p, stream);
    case DType::kBFloat16:
      return launch_typed<__nv_bfloat16>(p, stream);
    default:
      return launch_typed<float>(p, stream);
  }
}

}  // namespace epiloq::ops::groupwise_mm
