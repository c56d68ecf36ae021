#pragma once

// Epilogue path of the int8 convolution: sums go through shared memory, where each thread finds its own again and the
// other CTAs of a cluster find theirs for the split-K reduction.

#include "kernels/common/ptx/cluster.cuh"
#include "kernels/conv2d/int8_epilogue.cuh"
#include "kernels/conv2d/int8_producer.cuh"

namespace epiloq::ops::conv2d_int8 {

// A thread's sums: `kLines` pixels, and for each runs of 8 channels, 32 channels apart. A run is two 16-byte vectors,
// adjacent to other threads' vectors.
template <class T>
struct SumsInShared {
  static constexpr int kRuns = T::kWarpN / 32, kLines = 2 * T::Mainloop::kRows;
  static constexpr int kVectorStride = T::kThreads * 16;  // bytes between the vectors of a thread

  unsigned char* mine;

  __device__ __forceinline__ explicit SumsInShared(unsigned char* shared) : mine(shared + threadIdx.x * 16) {}

  __device__ __forceinline__ int* at(int line, int run, int value) const {
    return reinterpret_cast<int*>(mine + ((line * kRuns + run) * 2 + value / 4) * kVectorStride) + value % 4;
  }

  __device__ __forceinline__ void put(typename T::Mainloop::Sums const& sums) const {
#pragma unroll
    for (int r = 0; r < T::Mainloop::kRows; ++r) {
#pragma unroll
      for (int j = 0; j < T::Mainloop::kColumns; j += 2) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          unsigned const* const from = sums[r] + 4 * j + 2 * h;
          *reinterpret_cast<uint4*>(at(2 * r + h, j / 4, j % 4 * 2)) = {from[0], from[1], from[4], from[5]};
        }
      }
    }
  }

  // A run, summed over the cluster's CTAs.
  __device__ __forceinline__ void get(int (&sums)[kRun], int line, int run, int split) const {
#pragma unroll
    for (int i = 0; i < kRun; i += 4) *reinterpret_cast<int4*>(sums + i) = *reinterpret_cast<int4*>(at(line, run, i));
    for (int other = 1; other < split; ++other) {
      // Each CTA begins with a different one.
      int const rank = (blockIdx.z + other) % split;
#pragma unroll
      for (int i = 0; i < kRun; i += 4) {
        uint4 const more = load_dsmem(shared_address(at(line, run, i)), rank);
        sums[i] += static_cast<int>(more.x);
        sums[i + 1] += static_cast<int>(more.y);
        sums[i + 2] += static_cast<int>(more.z);
        sums[i + 3] += static_cast<int>(more.w);
      }
    }
  }
};

template <class T, class Out>
__device__ __forceinline__ void finish_as(SumsInShared<T> const& shared, TiledProblem const& t, CtaTile<T> const& tile,
                                          int first_row, int first_column) {
  Problem const& p = t.problem;
  int const split = gridDim.z, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int run = 0; run < SumsInShared<T>::kRuns; ++run) {
    int const column = first_column + 32 * run + lane % 4 * kRun, count = tile.count_n - column;
    int const n = tile.group * t.outputs + tile.first_n + column;
    Channels<Out, kRun> const channels(p.finish, count > 0 ? n : 0, max(count, 1));
#pragma unroll 1
    for (int line = blockIdx.z; line < SumsInShared<T>::kLines; line += split) {
      unsigned const m = tile.first_m + first_row + line / 2 * T::Mainloop::kRowStep + line % 2 * 8 + lane / 4;
      if (m >= conv2d::pixels(p.shape) || count <= 0) continue;
      int sums[kRun];
      shared.get(sums, line, run, split);
      alignas(16) Out out[kRun];
      bool const is_certain = channels.finish(out, sums);
      Out* const to = static_cast<Out*>(p.out) + m * p.shape.out_pixel + n;
      store(to, out, count, t.whole_runs && count >= kRun);
      if constexpr (std::is_same_v<Out, std::int8_t>) {
        if (is_certain) continue;
        unsigned doubtful = channels.doubtful(sums) & ((1u << min(count, kRun)) - 1);
        // Indexed at run time, so not in registers. No other CTA reads this one's part of the line.
#pragma unroll
        for (int i = 0; i < kRun; ++i) *shared.at(line, run, i) = sums[i];
        for (; doubtful != 0; doubtful &= doubtful - 1) {
          int const i = __ffs(doubtful) - 1;
          to[i] = exact(p.finish, n + i, *shared.at(line, run, i));
        }
      }
    }
  }
}

template <class T>
__device__ __forceinline__ void finish(SumsInShared<T> const& shared, TiledProblem const& t, CtaTile<T> const& tile,
                                       int first_row, int first_column) {
  switch (t.problem.out_dtype) {
    case DType::kInt8:
      return finish_as<T, std::int8_t>(shared, t, tile, first_row, first_column);
    case DType::kFloat16:
      return finish_as<T, __half>(shared, t, tile, first_row, first_column);
    case DType::kBFloat16:
      return finish_as<T, __nv_bfloat16>(shared, t, tile, first_row, first_column);
    default:
      return finish_as<T, float>(shared, t, tile, first_row, first_column);
  }
}

}  // namespace epiloq::ops::conv2d_int8
