#pragma once

// How tiled.cuh fills a stage in shared memory.

#include "core/async_copy.cuh"
#include "ops/conv2d_int8/configs.h"

namespace epiloq::ops::conv2d_int8 {

// 64 bytes a row; chunks of 16 trade places so that eight neighbouring rows of a chunk lie in different banks.
__device__ __forceinline__ int place(int row, int chunk) { return row * kDepth + ((chunk ^ (row / 2 % 4)) << 4); }

// kBytes of `from`, or as many times the byte that `fill` repeats.
template <int kBytes>
__device__ __forceinline__ void copy_or_fill(SharedAddress to, std::int8_t const* from, bool copy, unsigned fill) {
  if constexpr (kBytes == 16) {
    if (copy) {
      copy16(to, from);
    } else {
      *static_cast<uint4*>(__cvta_shared_to_generic(to)) = {fill, fill, fill, fill};
    }
  } else {
    if (copy) {
      copy4(to, from);
    } else {
      *static_cast<unsigned*>(__cvta_shared_to_generic(to)) = fill;
    }
  }
}

// Copies kRows rows of a stage: a thread takes one chunk of kBytes of every kApart-th row. row(i) says where from.
template <int kThreads, int kRows, int kBytes>
struct Copies {
  static constexpr int kChunks = kDepth / kBytes;
  static constexpr int kApart = kThreads / kChunks;
  static constexpr int kEach = kRows / kApart;
  static_assert(kThreads % kChunks == 0 && kRows % kApart == 0);

  static __device__ __forceinline__ int column() { return threadIdx.x % kChunks * kBytes; }

  struct From {
    std::int8_t const* at;
    bool is_there;
  };

  template <class Row>
  static __device__ __forceinline__ void run(SharedAddress stage, unsigned fill, Row row) {
    int const first = threadIdx.x / kChunks, chunk = column() / 16, within = column() % 16;
    if constexpr (kBytes == 1) {
      constexpr int kAtOnce = 8;  // on their way
#pragma unroll 1
      for (int i = 0; i < kEach; i += kAtOnce) {
        std::uint8_t bytes[kAtOnce];
#pragma unroll
        for (int b = 0; b < kAtOnce; ++b) {
          From const from = row(first + (i + b) * kApart);
          bytes[b] = static_cast<std::uint8_t>(from.is_there ? *from.at : fill);
        }
#pragma unroll
        for (int b = 0; b < kAtOnce; ++b) {
          SharedAddress const to = stage + place(first + (i + b) * kApart, chunk) + within;
          *static_cast<std::uint8_t*>(__cvta_shared_to_generic(to)) = bytes[b];
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        From const from = row(first + i * kApart);
        copy_or_fill<kBytes>(stage + place(first + i * kApart, chunk) + within, from.at, from.is_there, fill);
      }
    }
  }
};

}  // namespace epiloq::ops::conv2d_int8
