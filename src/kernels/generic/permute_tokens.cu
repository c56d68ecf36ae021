// 8-bit tokens in the order of columns that sm90/w4a16/byte_tokens.cuh multiplies; a thread permutes 16 columns. Has no
// tensor-core product, so it is compiled for every architecture rather than for SM90a.

#include <algorithm>

#include "core/cuda_check.h"
#include "epiloq/device.h"
#include "kernels/common/device_code.cuh"
#include "kernels/launch/w4a8_mm.h"

namespace epiloq::ops::w4a8_mm {
namespace {

constexpr int kThreads = 256, kRun = 16;

__global__ __launch_bounds__(kThreads) void permute_kernel(std::uint8_t const* from, std::int64_t stride, uint4* to,
                                                           int rows, int columns, int runs, bool aligned) {
  pdl_trigger();
  pdl_wait();
  int const run = blockIdx.x * kThreads + threadIdx.x;
  if (run >= runs) return;
  for (int row = blockIdx.y; row < rows; row += gridDim.y) {
    std::uint8_t const* const at = from + row * stride + run * kRun;
    uint4 in{};
    if (aligned && (run + 1) * kRun <= columns) {
      in = *reinterpret_cast<uint4 const*>(at);
    } else {
      alignas(16) std::uint8_t bytes[kRun] = {};
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        if (run * kRun + i < columns) bytes[i] = at[i];
      }
      in = *reinterpret_cast<uint4 const*>(bytes);
    }
    // Columns 2 t, 2 t + 8, 2 t + 1 and 2 t + 9.
    uint4 const out{__byte_perm(in.x, in.z, 0x5140), __byte_perm(in.x, in.z, 0x7362), __byte_perm(in.y, in.w, 0x5140),
                    __byte_perm(in.y, in.w, 0x7362)};
    to[std::int64_t{row} * runs + run] = out;
  }
}

}  // namespace

void launch_permute(Problem const& problem, int device, Stream stream) {
  DeviceGuard const guard(device);
  weight_only_mm::Problem const& p = problem.product;
  int const runs = p.weight.padded_k / kRun;
  bool const aligned = reinterpret_cast<std::uintptr_t>(problem.x_q) % 16 == 0 && problem.stride_x_q % 16 == 0;
  dim3 const grid(static_cast<unsigned>((runs + kThreads - 1) / kThreads), static_cast<unsigned>(std::min(p.m, 65535)));
  cuda_check(launch_pdl(&permute_kernel, grid, kThreads, 0, stream, problem.x_q, problem.stride_x_q,
                        static_cast<uint4*>(const_cast<void*>(p.x)), p.m, p.weight.k, runs, aligned),
             "launching epiloq.w4a8_mm's permutation");
}

}  // namespace epiloq::ops::w4a8_mm
