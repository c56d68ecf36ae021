#pragma once

// Main loop of the int8 convolution on SM90: wgmma with both operands in shared memory; the same threads issue the
// copies of a later stage.

#include "kernels/common/ptx/wgmma.cuh"
#include "kernels/conv2d/int8_producer.cuh"

namespace epiloq::ops::conv2d_int8 {

template <class T>
struct Wgmma {
  static constexpr int kMmaThreads = 128;  // a warpgroup
  static constexpr int kRows = T::kWarpM / 64, kColumns = T::kWarpN / 8;
  static constexpr int kRowStep = 64;
  // Other warpgroups may still read the previous stage.
  static constexpr int kAhead = T::kStages - 2;
  static constexpr int kInstructionDepth = 32;
  using Sums = unsigned[kRows][4 * kColumns];
  using Instruction =
      decltype(cute::SM90::GMMA::ss_op_selector<std::int8_t, std::int8_t, std::int32_t,
                                                cute::Shape<cute::_64, cute::Int<T::kWarpN>, cute::_32>>());
  static_assert(T::kDepth == 128 && kAhead > 0);

  static __device__ __forceinline__ int first_row(int warp_row) {
    return warp_row * T::kWarpM + threadIdx.x / 32 % 4 * 16;
  }

  // Makes this thread's cp.async copies visible to wgmma.
  static __device__ __forceinline__ void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

  static __device__ __forceinline__ void begin(Sums& sums, SharedAddress stage, int warp_row, int warp_column) {
    std::uint64_t const b = gemm::swizzled_descriptor(stage + T::kB + warp_column * T::kWarpN * T::kDepth);
    fence(sums);
    cute::warpgroup_arrive();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      std::uint64_t const a = gemm::swizzled_descriptor(stage + (warp_row * T::kWarpM + 64 * r) * T::kDepth);
#pragma unroll
      for (int k = 0; k < T::kDepth / kInstructionDepth; ++k) {
        constexpr int kStep = kInstructionDepth >> 4;
        gemm::wgmma_fma<Instruction>(a + k * kStep, b + k * kStep, sums[r], true,
                                     std::make_index_sequence<4 * kColumns>{});
      }
    }
    cute::warpgroup_commit_batch();
  }

  // Waits until the previous stage has been read.
  static __device__ __forceinline__ void end(Sums&, SharedAddress, int, int) { cute::warpgroup_wait<1>(); }

  static __device__ __forceinline__ void wait_for_all(Sums& sums) {
    cute::warpgroup_wait<0>();
    fence(sums);
  }

  static __device__ __forceinline__ void fence(Sums& sums) {
#pragma unroll
    for (auto& row : sums) {
#pragma unroll
      for (unsigned& sum : row) cute::warpgroup_fence_operand(sum);
    }
  }
};

template <>
struct MainloopOf<Mma::kWgmma> {
  template <class T>
  using Of = Wgmma<T>;
};

}  // namespace epiloq::ops::conv2d_int8
