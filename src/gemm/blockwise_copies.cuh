#pragma once

// How blockwise.cuh fills a stage in shared memory: cp.async by the threads of a team.

#include <cstdint>

#include "core/async_copy.cuh"

namespace epiloq::gemm {

constexpr int kParameterKinds = 3;  // a block's, at most

// 16 bytes, or as many zeros. The rest of their 128 is fetched into L2, for the next stages.
__device__ __forceinline__ void copy_async(SharedAddress target, void const* source, bool inside) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(inside ? 16 : 0)
               : "memory");
}

// Rows of a matrix by 16-byte chunks, each row's chunks permuted so that eight neighbouring rows of a chunk lie in
// different banks.
template <int kThreads, int kTileRows, int kRowBytes>
struct ValueCopies {
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kRowsAtOnce = kThreads / kChunks;
  static_assert(kTileRows % kRowsAtOnce == 0);

  static __device__ int place(int row, int chunk) {
    int const key = kChunks == 8 ? row % 8 : row / 2 % 4;
    return row * kRowBytes + ((chunk ^ key) << 4);
  }
  static __device__ void copy(unsigned target, std::int8_t const* source, std::int64_t stride, int first, int rows,
                              int step, int thread) {
    int const chunk = thread % kChunks;
    std::int8_t const* const base = source + static_cast<std::int64_t>(step) * kRowBytes + chunk * 16;
#pragma unroll
    for (int i = 0; i < kTileRows / kRowsAtOnce; ++i) {
      int const row = i * kRowsAtOnce + thread / kChunks;
      bool const inside = first + row < rows;
      copy_async(target + place(row, chunk), base + (inside ? first + row : 0) * stride, inside);
    }
  }
};

// Parameters of a stage's blocks: [block][kind][row].
template <int kThreads, int kTileRows, int kBlocks>
struct ParameterCopies {
  static __device__ void copy(unsigned target, float const* source, int source_kinds, int kinds, int first,
                              int padded_rows, int step, int thread) {
    constexpr int kChunks = kTileRows / 4;
    for (int i = thread; i < kBlocks * kinds * kChunks; i += kThreads) {
      int const row = 4 * (i % kChunks), line = i / kChunks;
      int const kind = line / kBlocks, block = line % kBlocks;
      bool const inside = first + row < padded_rows;
      std::int64_t const from = static_cast<std::int64_t>(step * kBlocks + block) * source_kinds + kind;
      copy_async(target + ((block * kParameterKinds + kind) * kTileRows + row) * 4,
                 source + from * padded_rows + (inside ? first + row : 0), inside);
    }
  }
};

}  // namespace epiloq::gemm
