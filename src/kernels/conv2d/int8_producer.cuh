#pragma once

// Producer of the int8 convolution: every thread copies one chunk of every kApart-th row of pixels, then of weights.

#include "kernels/common/ptx/cp_async.cuh"
#include "kernels/conv2d/int8_config.h"
#include "kernels/launch/conv2d_int8.h"

namespace epiloq::ops::conv2d_int8 {

// ::Of<Tiled<…>> multiplies a stage: sm80/ and sm90/conv2d_int8_mainloop.cuh.
template <Mma>
struct MainloopOf;

// Rows of kDepth bytes; 16-byte chunks are permuted so that the same chunk of eight neighbouring rows lies in different
// banks. For 128 bytes this is wgmma's 128-byte swizzle.
template <int kDepth>
__device__ __forceinline__ int swizzled_offset(int row, int chunk) {
  return row * kDepth + ((chunk ^ (row / (128 / kDepth) % (kDepth / 16))) << 4);
}

// The channel in a row of a weight tile, ordered so that a thread's sums belong to eight neighbouring channels (2t and
// 2t + 1 of the instruction's four times 8 columns become 8t to 8t + 7).
__device__ __forceinline__ int channel_of(int row) {
  return row / 32 * 32 + row % 8 / 2 * 8 + row / 8 % 4 * 2 + row % 2;
}

// kBytes of `from`, or the byte repeated in `fill`.
template <int kBytes>
__device__ __forceinline__ void copy_or_fill(SharedAddress to, std::int8_t const* from, bool copy, unsigned fill) {
  static_assert(kBytes == 16 || kBytes == 4);
#if __CUDA_ARCH__ >= 800
  // Without a branch per chunk.
  if constexpr (kBytes == 16) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %2, 0;\n\t@p cp.async.cg.shared.global [%0], [%1], 16;\n\t"
        "@!p st.shared.v4.b32 [%0], {%3, %3, %3, %3};\n\t}" ::"r"(to),
        "l"(from), "r"(int{copy}), "r"(fill)
        : "memory");
  } else {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %2, 0;\n\t@p cp.async.ca.shared.global [%0], [%1], 4;\n\t"
        "@!p st.shared.b32 [%0], %3;\n\t}" ::"r"(to),
        "l"(from), "r"(int{copy}), "r"(fill)
        : "memory");
  }
#else
  using Chunk = std::conditional_t<kBytes == 16, uint4, unsigned>;
  Chunk chunk;
  if constexpr (kBytes == 16) {
    chunk = {fill, fill, fill, fill};
  } else {
    chunk = fill;
  }
  if (copy) chunk = *reinterpret_cast<Chunk const*>(from);
  *static_cast<Chunk*>(__cvta_shared_to_generic(to)) = chunk;
#endif
}

// The CTA's tile of D and its slice of the columns, in stages.
template <class T>
struct CtaTile {
  std::int8_t const* x;       // of the group
  std::int8_t const* weight;  // of the tile's first channel
  unsigned first_m;
  int group, first_n, count_n;  // channels of the group from the tile's first on
  int first_stage, stages;

  __device__ __forceinline__ explicit CtaTile(TiledProblem const& t) {
    group = blockIdx.y;
    first_m = blockIdx.x / t.tiles_n * T::kTileM;
    first_n = static_cast<int>(blockIdx.x % t.tiles_n) * T::kTileN;
    count_n = t.outputs - first_n;
    x = t.problem.x + group * t.channels;
    weight = t.problem.weight + (static_cast<std::int64_t>(group) * t.outputs + first_n) * t.columns;
    int const all = (t.columns + T::kDepth - 1) / T::kDepth, split = gridDim.z, rank = blockIdx.z;
    first_stage = all * rank / split;
    stages = all * (rank + 1) / split - first_stage;
  }
};

template <class T>
struct Chunks {
  static constexpr int kBytes = T::kBytes == 16 ? 16 : 4;
  static constexpr int kOfRow = T::kDepth / kBytes;
  static constexpr int kApart = T::kThreads / kOfRow;
  static constexpr int kPixels = T::kTileM / kApart, kWeights = T::kTileN / kApart;
  static_assert(T::kThreads % kOfRow == 0 && T::kTileM % kApart == 0 && T::kTileN % kApart == 0);
  static_assert(kApart % 8 == 0, "rows that a thread copies differ in their swizzle");

  static __device__ __forceinline__ int row() { return threadIdx.x / kOfRow; }
  static __device__ __forceinline__ int column() { return threadIdx.x % kOfRow * kBytes; }
  static __device__ __forceinline__ int to() {
    return swizzled_offset<T::kDepth>(row(), column() / 16) + column() % 16;
  }
};

// Chunks of 16 or 4 bytes; their sources stay in registers.
template <class T>
struct WideCopies {
  using C = Chunks<T>;
  static constexpr unsigned kNone = ~0u;

  std::int8_t const* pixels[C::kPixels];  // a window's first tap
  int y[C::kPixels], x[C::kPixels];
  std::int8_t const* weight;
  unsigned
      weights[C::kWeights];  // byte offsets; kNone past the last channel, which would otherwise load L2 from every CTA
  conv2d::Column column;     // of this thread in the next stage
  int k, to = C::to();

  __device__ __forceinline__ WideCopies(TiledProblem const& t, CtaTile<T> const& tile, conv2d::Window const* windows)
      : weight(tile.weight) {
#pragma unroll
    for (int i = 0; i < C::kPixels; ++i) {
      conv2d::Window const window = windows[C::row() + i * C::kApart];
      pixels[i] = tile.x + window.at;
      y[i] = window.y;
      x[i] = window.x;
    }
#pragma unroll
    for (int i = 0; i < C::kWeights; ++i) {
      int const channel = channel_of(C::row() + i * C::kApart);
      weights[i] = channel < tile.count_n ? channel * t.columns : kNone;
    }
    k = tile.first_stage * T::kDepth + C::column();
    column = conv2d::Column::of(t.problem.shape, t.channels, k);
  }

  __device__ __forceinline__ void issue(TiledProblem const& t, SharedAddress stage) {
    conv2d::Shape const& shape = t.problem.shape;
    conv2d::Offset const offset(shape, column);
#pragma unroll
    for (int i = 0; i < C::kPixels; ++i) {
      bool const inside = is_inside(shape, {0, y[i], x[i]}, offset);
      copy_or_fill<T::kBytes>(stage + to + i * C::kApart * T::kDepth, pixels[i] + offset.at, inside, t.fill);
    }
    bool const is_valid = k < t.columns;
    std::int8_t const* const from = weight + k;
#pragma unroll
    for (int i = 0; i < C::kWeights; ++i) {
      bool const copy = is_valid & (weights[i] != kNone);
      copy_or_fill<T::kBytes>(stage + T::kB + to + i * C::kApart * T::kDepth, from + weights[i], copy, 0);
    }
    k += T::kDepth;
    column.advance(shape, t.channels, t.stage);
  }
};

// Single bytes, four columns per store. The windows stay in shared memory.
template <class T>
struct ByteCopies {
  using C = Chunks<T>;
  static constexpr int kAtOnce = 4;  // rows

  conv2d::Window const* windows;
  std::int8_t const *x, *weight;
  int count_n;
  conv2d::Column column;  // the first of this thread's in the next stage
  int k;

  __device__ __forceinline__ ByteCopies(TiledProblem const& t, CtaTile<T> const& tile, conv2d::Window const* windows_)
      : windows(windows_), x(tile.x), weight(tile.weight), count_n(tile.count_n) {
    k = tile.first_stage * T::kDepth + C::column();
    column = conv2d::Column::of(t.problem.shape, t.channels, k);
  }

  // word(row) holds a row's four columns.
  template <int kRows, class Word>
  static __device__ __forceinline__ void run(SharedAddress stage, Word word) {
    SharedAddress const to = stage + C::to();
#pragma unroll 1
    for (int i = 0; i < kRows; i += kAtOnce) {
      unsigned words[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) words[j] = word(C::row() + (i + j) * C::kApart);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        *static_cast<unsigned*>(__cvta_shared_to_generic(to + (i + j) * C::kApart * T::kDepth)) = words[j];
      }
    }
  }

  // byte(i) loads the byte of the ith column.
  template <class Byte>
  static __device__ __forceinline__ unsigned joined(Byte byte) {
    unsigned word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) word |= unsigned{static_cast<std::uint8_t>(byte(i))} << 8 * i;
    return word;
  }

  __device__ __forceinline__ void issue(TiledProblem const& t, SharedAddress stage) {
    conv2d::Shape const& shape = t.problem.shape;
    conv2d::Column next = column;
    conv2d::Offset offsets[4];
#pragma unroll
    for (conv2d::Offset& offset : offsets) {
      offset = conv2d::Offset(shape, next);
      next.advance(shape, t.channels, {0, 0, 1});
    }
    run<C::kPixels>(stage, [&](int row) {
      conv2d::Window const window = windows[row];
      std::int8_t const* const first = x + window.at;
      return joined([&](int i) {
        return is_inside(shape, window, offsets[i]) ? first[offsets[i].at] : static_cast<std::int8_t>(t.fill);
      });
    });
    run<C::kWeights>(stage + T::kB, [&](int row) {
      int const channel = channel_of(row), valid = channel < count_n ? t.columns - k : 0;
      std::int8_t const* const first = weight + channel * t.columns + k;
      return joined([&](int i) { return i < valid ? first[i] : std::int8_t{0}; });
    });
    k += T::kDepth;
    column.advance(shape, t.channels, t.stage);
  }
};

}  // namespace epiloq::ops::conv2d_int8
