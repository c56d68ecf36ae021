#pragma once

// Main loop of the int8 convolution with mma.sync: fragments of m16n8k32, which SM75 composes of four of its own.

#include "kernels/common/ptx/ldmatrix.cuh"
#include "kernels/conv2d/int8_producer.cuh"

namespace epiloq::ops::conv2d_int8 {

// c: rows g and g + 8 of a lane, two neighbouring columns each. Sums wrap, hence unsigned.
__device__ __forceinline__ void mma_s8(unsigned* c, unsigned const (&a)[4], unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  // a: rows g and g + 8 of the first half of K, then of the second.
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
          : "+r"(c[2 * row]), "+r"(c[2 * row + 1])
          : "r"(a[2 * half + row]), "r"(half == 0 ? b0 : b1));
    }
  }
#endif
}

template <class T>
struct MmaSync {
  static constexpr int kMmaThreads = 32;                                  // a warp
  static constexpr int kRows = T::kWarpM / 16, kColumns = T::kWarpN / 8;  // fragments of a warp
  static constexpr int kRowStep = 16;                                     // from one fragment to the next
  static constexpr int kAhead = T::kStages - 1;                           // a stage is read before the next barrier
  using Sums = unsigned[kRows][4 * kColumns];

  static __device__ __forceinline__ int first_row(int warp_row) { return warp_row * T::kWarpM; }

  // Hooks that only the wgmma main loop needs.
  static __device__ __forceinline__ void publish() {}
  static __device__ __forceinline__ void begin(Sums&, SharedAddress, int, int) {}
  static __device__ __forceinline__ void wait_for_all(Sums&) {}

  static __device__ __forceinline__ void end(Sums& sums, SharedAddress stage, int warp_row, int warp_column) {
    int const lane = threadIdx.x % 32;
    int const row = warp_row * T::kWarpM + lane % 16;
    int const column = warp_column * T::kWarpN + lane / 16 * 8 + lane % 8;
#pragma unroll
    for (int d = 0; d < T::kDepth / 32; ++d) {
      unsigned a[kRows][4], b[kColumns / 2][4];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        gemm::ldmatrix_x4(a[r], stage + swizzled_offset<T::kDepth>(row, 2 * d + lane / 16) + 16 * r * T::kDepth);
      }
#pragma unroll
      for (int j = 0; j < kColumns / 2; ++j) {
        int const at = swizzled_offset<T::kDepth>(column, 2 * d + lane / 8 % 2) + 16 * j * T::kDepth;
        gemm::ldmatrix_x4(b[j], stage + T::kB + at);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          mma_s8(sums[r] + 4 * j, a[r], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }
};

template <>
struct MainloopOf<Mma::kSync> {
  template <class T>
  using Of = MmaSync<T>;
};

}  // namespace epiloq::ops::conv2d_int8
