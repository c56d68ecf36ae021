#pragma once

// Packed integers to A fragments of mma.sync m16n8k16, q - zero in 16 bits, exactly, without a conversion instruction:
// an integer ORed into the last bits of a power of two is that power plus the integer.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace epiloq::ops::weight_only_mm {

using Word = std::uint32_t;

// kBits / 4 words of a lane make its four registers of one fragment: rows g, g + 8, g, g + 8. `Zero` is what the two
// rows subtract, in the form that the subtraction wants.
template <class T, int kBits>
struct Fragment;

__device__ __forceinline__ Word twice(Word half) { return half * 0x10001u; }
// (a & mask) | power in one instruction, which takes one constant: the compiler by itself writes two.
__device__ __forceinline__ Word masked_or(Word a, Word mask, Word power) {
  Word result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(a), "r"(mask), "r"(power));
  return result;
}
__device__ __forceinline__ Word subtract(Word a, Word b) {
  Word result;
  asm("sub.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

template <>
struct Fragment<__half, 4> {
  static constexpr Word kOnes = 0x3c003c00;
  struct Zero {
    Word low, high;  // 1024 + zero; -(64 + zero)
  };
  static __device__ __forceinline__ Zero zero(Word low_row, Word high_row) {
    return {twice(0x6400 | low_row), twice(0xd400 | high_row << 4)};
  }
  // In the upper half of a byte a nibble counts 16 times: (1024 + 16 q) / 16 = 64 + q.
  static __device__ __forceinline__ Word sixteenth(Word a, Word minus) {
    Word result;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(0x2c002c00u), "r"(minus));
    return result;
  }
  static __device__ __forceinline__ void make(Word (&a)[4], Word const* w, Zero zero) {
    Word const first = w[0], second = first >> 8;
    a[0] = subtract(masked_or(first, 0x000f000f, 0x64006400), zero.low);
    a[1] = sixteenth(masked_or(first, 0x00f000f0, 0x64006400), zero.high);
    a[2] = subtract(masked_or(second, 0x000f000f, 0x64006400), zero.low);
    a[3] = sixteenth(masked_or(second, 0x00f000f0, 0x64006400), zero.high);
  }
};

template <>
struct Fragment<__half, 8> {
  static constexpr Word kOnes = 0x3c003c00;
  struct Zero {
    Word low, high;  // 1024 + zero
  };
  static __device__ __forceinline__ Zero zero(Word low_row, Word high_row) {
    return {twice(0x6400 | low_row), twice(0x6400 | high_row)};
  }
  static __device__ __forceinline__ void make(Word (&a)[4], Word const* w, Zero zero) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      a[2 * half] = subtract(__byte_perm(w[half], 0x64646464u, 0x4140), zero.low);
      a[2 * half + 1] = subtract(__byte_perm(w[half], 0x64646464u, 0x4342), zero.high);
    }
  }
};

// bfloat16 holds integers up to 256: 128 + q for four bits, and for eight the difference, made in fp32.
template <>
struct Fragment<__nv_bfloat16, 4> {
  static constexpr Word kOnes = 0x3f803f80;
  struct Zero {
    Word low, high;  // -(128 + zero)
  };
  static __device__ __forceinline__ Zero zero(Word low_row, Word high_row) {
    return {twice(0xc300 | low_row), twice(0xc300 | high_row)};
  }
  static __device__ __forceinline__ void make(Word (&a)[4], Word const* w, Zero zero) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Word const value = masked_or(w[0] >> 4 * i, 0x000f000f, 0x43004300);
      asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(a[i]) : "r"(value), "r"(kOnes), "r"(i % 2 ? zero.high : zero.low));
    }
  }
};

template <>
struct Fragment<__nv_bfloat16, 8> {
  static constexpr Word kOnes = 0x3f803f80;
  struct Zero {
    float low, high;  // 2^23 + zero
  };
  static __device__ __forceinline__ Zero zero(Word low_row, Word high_row) {
    return {__uint_as_float(0x4b000000u | low_row), __uint_as_float(0x4b000000u | high_row)};
  }
  static __device__ __forceinline__ float difference(Word w, int selector, float zero) {
    return __uint_as_float(__byte_perm(w, 0x4b000000u, selector)) - zero;
  }
  static __device__ __forceinline__ void make(Word (&a)[4], Word const* w, Zero zero) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float const z = i % 2 ? zero.high : zero.low;
      float const first = difference(w[i / 2], i % 2 ? 0x7542 : 0x7540, z);
      float const second = difference(w[i / 2], i % 2 ? 0x7543 : 0x7541, z);
      a[i] = __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x7632);  // their upper halves: exact
    }
  }
};

// D = A B + C. SM75 has half the depth, and no bfloat16.
template <class T>
__device__ __forceinline__ void mma(float (&d)[4], Word const (&a)[4], Word b0, Word b1, float const (&c)[4]);

template <>
__device__ __forceinline__ void mma<__half>(float (&d)[4], Word const (&a)[4], Word b0, Word b1, float const (&c)[4]) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
#else
  float e[4];
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%8,%9,%10};"
      : "=f"(e[0]), "=f"(e[1]), "=f"(e[2]), "=f"(e[3])
      : "r"(a[0]), "r"(a[1]), "r"(b0), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%8,%9,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[2]), "r"(a[3]), "r"(b1), "f"(e[0]), "f"(e[1]), "f"(e[2]), "f"(e[3]));
#endif
}

template <>
__device__ __forceinline__ void mma<__nv_bfloat16>(float (&d)[4], Word const (&a)[4], Word b0, Word b1,
                                                   float const (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

}  // namespace epiloq::ops::weight_only_mm
