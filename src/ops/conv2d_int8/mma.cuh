#pragma once

// Products of int8 on tensor cores by m16n8k32's fragments, which SM75 makes of four of its own.

namespace epiloq::ops::conv2d_int8 {

__device__ __forceinline__ void mma_s8(int (&c)[4], unsigned const (&a)[4], unsigned b0, unsigned b1) {
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

}  // namespace epiloq::ops::conv2d_int8
