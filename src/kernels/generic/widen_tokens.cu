// 8-bit tokens times their scales as bfloat16, which the 16-bit kernels multiply by 4-bit weights; a thread widens 16
// columns.

#include <algorithm>

#include "core/cuda_check.h"
#include "epiloq/device.h"
#include "kernels/common/device_code.cuh"
#include "problems/w4a8_mm.h"

namespace epiloq::ops::w4a8_mm {
namespace {

constexpr int kThreads = 128, kRun = 16;

template <class Q>
__device__ __forceinline__ float value_of(std::uint8_t byte) {
  if constexpr (std::is_same_v<Q, std::int8_t>) {
    return static_cast<float>(static_cast<std::int8_t>(byte));
  } else {
    Q value;
    value.__x = byte;
    return static_cast<float>(value);
  }
}

template <class Q>
__global__ __launch_bounds__(kThreads) void widen_kernel(__grid_constant__ WidenProblem const p) {
  pdl_trigger();  // the product then loads its first weights while tokens are widened
  pdl_wait();
  int const first = (blockIdx.x * kThreads + threadIdx.x) * kRun;
  if (first >= p.columns) return;
  bool const whole = p.aligned && first + kRun <= p.columns;
  for (int row = blockIdx.y; row < p.rows; row += gridDim.y) {
    std::uint8_t const* const from = p.x_q + row * p.stride_x_q + first;
    __nv_bfloat16* const to = static_cast<__nv_bfloat16*>(p.out) + row * p.stride_out + first;
    float const scale = p.scale_a[row * p.stride_scale];
    if (whole) {
      alignas(16) std::uint8_t bytes[kRun];
      alignas(16) __nv_bfloat16 values[kRun];
      *reinterpret_cast<uint4*>(bytes) = *reinterpret_cast<uint4 const*>(from);
#pragma unroll
      for (int i = 0; i < kRun; ++i) values[i] = static_cast<__nv_bfloat16>(value_of<Q>(bytes[i]) * scale);
      reinterpret_cast<uint4*>(to)[0] = reinterpret_cast<uint4 const*>(values)[0];
      reinterpret_cast<uint4*>(to)[1] = reinterpret_cast<uint4 const*>(values)[1];
    } else {
      for (int i = 0; i < min(kRun, p.columns - first); ++i) {
        to[i] = static_cast<__nv_bfloat16>(value_of<Q>(from[i]) * scale);
      }
    }
  }
}

}  // namespace

void launch_widen(WidenProblem const& p, DType element, int device, Stream stream) {
  DeviceGuard const guard(device);
  int const runs = (p.columns + kRun - 1) / kRun;
  dim3 const grid(static_cast<unsigned>((runs + kThreads - 1) / kThreads),
                  static_cast<unsigned>(std::min(p.rows, 65535)));
  auto* const kernel = element == DType::kInt8 ? &widen_kernel<std::int8_t> : &widen_kernel<__nv_fp8_e4m3>;
  cuda_check(launch_pdl(kernel, grid, kThreads, 0, stream, p), "launching epiloq.w4a8_mm's widening of tokens");
}

}  // namespace epiloq::ops::w4a8_mm
