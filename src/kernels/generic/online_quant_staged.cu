// Staged reference: after the quantising kernel, an int32 product per quantisation block, dequantised onto FP32 sums in
// device memory, then bias, limits and the output type.

#include <algorithm>

#include "core/cuda_check.h"
#include "kernels/common/device_code.cuh"
#include "kernels/generic/gemm.cuh"
#include "problems/online_quant_mm.h"

namespace epiloq::ops::online_quant_mm {
namespace {

constexpr int kThreads = 256;

struct Integers {
  using Out = std::int32_t;
  template <class>
  EPILOQ_HD static epilogue::Acc make(epilogue::Operands const&) {
    return {};
  }
};

struct Element {
  int m, n;
  bool inside;
  std::int64_t index;
};

__device__ Element element_of(gemm::OnlineQuantGemmProblem const& p) {
  int const m = blockIdx.x, n = blockIdx.y * kThreads + threadIdx.x;
  return {m, n, n < p.n, static_cast<std::int64_t>(m) * p.n + n};
}

__global__ void __launch_bounds__(kThreads) accumulate(__grid_constant__ gemm::OnlineQuantGemmProblem const p,
                                                       std::int32_t const* products, float* sums, int block) {
  pdl_wait();
  pdl_trigger();
  auto const [m, n, inside, index] = element_of(p);
  if (!inside) return;
  float const* const a = p.a_parameters + static_cast<std::int64_t>(block) * 3 * p.padded_m + m;
  float const* const b = p.b_parameters + static_cast<std::int64_t>(block) * p.kinds * p.padded_n + n;
  float sum = block == 0 ? 0.f : sums[index];
  sum = fmaf(a[0] * static_cast<float>(products[index]), b[0], sum);
  sum = fmaf(a[p.padded_m], b[p.padded_n], sum);
  if (p.kinds == 3) sum = fmaf(a[2 * p.padded_m], b[2 * p.padded_n], sum);
  sums[index] = sum;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    finish(__grid_constant__ gemm::OnlineQuantGemmProblem const p, float const* sums) {
  pdl_wait();
  pdl_trigger();
  auto const [m, n, inside, index] = element_of(p);
  if (!inside) return;
  float const x = p.bias == nullptr ? sums[index] : sums[index] + static_cast<float>(static_cast<T const*>(p.bias)[n]);
  static_cast<T*>(p.out)[m * p.stride_out + n] = static_cast<T>(clamped(x, p.lo, p.hi));
}

template <class T>
void launch_finish(Work const& work, dim3 grid, Stream stream) {
  cuda_check(launch_pdl(finish<T>, grid, kThreads, 0, stream, work.gemm, work.sums),
             "launching epiloq.online_quant_mm");
}

}  // namespace

void launch_staged(Work const& work, int device, Stream stream) {
  gemm::OnlineQuantGemmProblem const& p = work.gemm;
  dim3 const grid(p.m, (p.n + kThreads - 1) / kThreads);
  int const k = work.quantise.cols, group = work.quantise.group;
  for (int begin = 0, block = 0; begin < k; begin += group, ++block) {
    gemm::Problem const product{p.m,           p.n, std::min(group, k - begin), p.k, p.k, p.n, p.a + begin, p.b + begin,
                                work.products, {}};
    gemm::launch_generic<std::int8_t, std::int8_t, Integers>(product, device, stream);
    cuda_check(launch_pdl(accumulate, grid, kThreads, 0, stream, p, work.products, work.sums, block),
               "launching epiloq.online_quant_mm");
  }
  switch (p.dtype) {
    case DType::kFloat16:
      return launch_finish<__half>(work, grid, stream);
    case DType::kBFloat16:
      return launch_finish<__nv_bfloat16>(work, grid, stream);
    default:
      return launch_finish<float>(work, grid, stream);
  }
}

}  // namespace epiloq::ops::online_quant_mm
