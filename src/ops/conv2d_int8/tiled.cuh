#pragma once

// int8 convolution as an implicit product on tensor cores (mma.sync), for SM75 and newer.
//
// A block owns a tile of output pixels by output channels and walks along the columns of im2col.h in stages of 64, a
// ring of them in shared memory filled by cp.async. What lies outside of the image is not copied but written: the
// input's zero point, in a store where the copy would be. That is exact at every border, at no cost in the interior,
// which zeros and a correction by the output's place would not be.
//
// Copies are 16 channels wide where a group's channels allow it, else 4, else single bytes (an image's 3 channels).

#include "core/cuda_check.h"
#include "gemm/matrix_loads.cuh"
#include "ops/conv2d/im2col.h"
#include "ops/conv2d_int8/configs.h"
#include "ops/conv2d_int8/copies.cuh"
#include "ops/conv2d_int8/finish.cuh"
#include "ops/conv2d_int8/mma.cuh"
#include "ops/conv2d_int8/rows.h"

namespace epiloq::ops::conv2d_int8 {

using conv2d::Column;
using conv2d::Window;

// Integers rather than a TileConfig: nvcc 13.0 cannot spell a structural value in the stub of a __global__ template.
template <int kWarpM, int kWarpN, int kWarpsM, int kWarpsN, int kStages_, int kBytes, int kBlocks_>
struct Tiled {
  static constexpr int kTileM = kWarpM * kWarpsM, kTileN = kWarpN * kWarpsN;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kBlocks = kBlocks_;  // an SM
  static constexpr int kStages = kStages_;
  static constexpr int kWarpRows = kWarpM, kWarpColumns = kWarpN;
  static constexpr int kRows = kWarpM / 16, kColumns = kWarpN / 8;  // fragments of a warp
  static constexpr int kB = kTileM * kDepth;                        // the weights' place in a stage
  static constexpr int kStageBytes = (kTileM + kTileN) * kDepth;
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kPitch = kWarpN + 8;
  static constexpr int kSlabBytes = 16 * kPitch * 4;  // a warp's sums on their way, 16 pixels
  static_assert(kWarpsM * kWarpsN * kSlabBytes <= kRingBytes);

  using Pixels = Copies<kThreads, kTileM, kBytes>;
  using Weights = Copies<kThreads, kTileN, kBytes>;
  using Sums = int[kRows][kColumns][4];

  // This block's part of the problem, and this thread's column in the next stage to be asked for.
  struct Place {
    std::int8_t const* x;       // of the group
    std::int8_t const* weight;  // of the tile's first channel
    unsigned first_m;
    int group, first_n, count_n;  // channels of the group from the tile's first on
    Column column;
    int k;

    __device__ __forceinline__ explicit Place(TiledProblem const& t) {
      group = blockIdx.y;
      first_m = blockIdx.x / t.tiles_n * kTileM;
      first_n = static_cast<int>(blockIdx.x % t.tiles_n) * kTileN;
      count_n = t.outputs - first_n;
      x = t.problem.x + group * t.channels;
      weight = t.problem.weight + (static_cast<std::int64_t>(group) * t.outputs + first_n) * t.columns;
      k = Pixels::column();
      column = Column::of(t.problem.shape, t.channels, k);
    }
  };

  static __device__ __forceinline__ void ask(TiledProblem const& t, Place& here, Window const* windows,
                                             SharedAddress stage) {
    conv2d::Shape const& shape = t.problem.shape;
    conv2d::Offset const offset(shape, here.column);
    Pixels::run(stage, t.fill, [&](int row) {
      Window const window = windows[row];
      return typename Pixels::From{here.x + (window.at + offset.at), is_inside(shape, window, offset)};
    });
    bool const is_there = here.k < t.columns;
    Weights::run(stage + kB, 0, [&](int row) {
      return typename Weights::From{here.weight + static_cast<std::int64_t>(row) * t.columns + here.k,
                                    is_there && row < here.count_n};
    });
    here.k += kDepth;
    here.column.advance(shape, t.channels, t.stage);
  }

  static __device__ __forceinline__ void multiply(Sums& sums, SharedAddress stage, int first_row, int first_column) {
    int const lane = threadIdx.x % 32;
#pragma unroll
    for (int d = 0; d < kDepth / 32; ++d) {
      unsigned a[kRows][4], b[kColumns / 2][4];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        gemm::load_matrices(a[r], stage + place(first_row + 16 * r + lane % 16, 2 * d + lane / 16));
      }
#pragma unroll
      for (int j = 0; j < kColumns / 2; ++j) {
        int const column = first_column + 16 * j + lane / 16 * 8 + lane % 8;
        gemm::load_matrices(b[j], stage + kB + place(column, 2 * d + lane / 8 % 2));
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) mma_s8(sums[r][j], a[r], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
      }
    }
  }

  static __device__ __forceinline__ void start(Sums& sums, TiledProblem const& t, Place const& here, int column) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int const n = column + 8 * j + threadIdx.x % 4 * 2 + i;
        int const first = n < here.count_n ? first_sum(t.problem.finish, here.group * t.outputs + here.first_n + n) : 0;
#pragma unroll
        for (int r = 0; r < kRows; ++r) sums[r][j][i] = sums[r][j][2 + i] = first;
      }
    }
  }

  // A warp's sums pass through shared memory 16 pixels at a time, so that a thread gets neighbouring channels.
  template <class Out>
  static __device__ __forceinline__ void finish(Sums const& sums, TiledProblem const& t, Place const& here, int* slab,
                                                int first_row, int first_column) {
    constexpr int kRuns = kWarpN / kRun, kAtOnce = 32 / kRuns;  // pixels
    Problem const& p = t.problem;
    int const lane = threadIdx.x % 32, column = lane % kRuns * kRun, count = here.count_n - first_column - column;
    int const n = here.group * t.outputs + here.first_n + first_column + column;
    Channels<Out, kRun> const channels(p.finish, count > 0 ? n : 0, max(count, 1));
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      __syncwarp();  // the slab has been read
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          int* const to = slab + (8 * h + lane / 4) * kPitch + 8 * j + lane % 4 * 2;
          *reinterpret_cast<int2*>(to) = {sums[r][j][2 * h], sums[r][j][2 * h + 1]};
        }
      }
      __syncwarp();
#pragma unroll 1
      for (int row = lane / kRuns; row < 16; row += kAtOnce) {
        unsigned const m = here.first_m + first_row + 16 * r + row;
        if (m >= conv2d::pixels(p.shape) || count <= 0) continue;
        int const* const from = slab + row * kPitch + column;
        alignas(16) int run[kRun];
#pragma unroll
        for (int i = 0; i < kRun / 4; ++i) {
          reinterpret_cast<int4*>(run)[i] = reinterpret_cast<int4 const*>(from)[i];
        }
        alignas(16) Out out[kRun];
        bool const is_right = channels.finish(out, run);
        Out* const to = static_cast<Out*>(p.out) + m * p.shape.out_pixel + n;
        store(to, out, count, t.whole_runs && count >= kRun);
        if constexpr (std::is_same_v<Out, std::int8_t>) {
          if (is_right) continue;
#pragma unroll 1
          for (int i = 0; i < min(count, kRun); ++i) to[i] = exact(p.finish, n + i, from[i]);
        }
      }
    }
  }

  static __device__ __forceinline__ void finish_as(Sums const& sums, TiledProblem const& t, Place const& here,
                                                   int* slab, int first_row, int first_column) {
    switch (t.problem.out_dtype) {
      case DType::kInt8:
        return finish<std::int8_t>(sums, t, here, slab, first_row, first_column);
      case DType::kFloat16:
        return finish<__half>(sums, t, here, slab, first_row, first_column);
      case DType::kBFloat16:
        return finish<__nv_bfloat16>(sums, t, here, slab, first_row, first_column);
      default:
        return finish<float>(sums, t, here, slab, first_row, first_column);
    }
  }
};

// Blocks along x take tiles, channels fastest, so that blocks of the same pixels run together; along y groups.
template <class T>
__global__ __launch_bounds__(T::kThreads, T::kBlocks) void tiled_kernel(__grid_constant__ TiledProblem const t) {
  extern __shared__ __align__(128) unsigned char shared[];
  auto* const windows = reinterpret_cast<Window*>(shared + T::kRingBytes);
  int const warp = threadIdx.x / 32;
  typename T::Place here(t);
  let_next_kernel_start();
  for (int row = threadIdx.x; row < T::kTileM; row += T::kThreads) {
    windows[row] = conv2d::window_of(t.problem.shape, here.first_m + row);
  }
  __syncthreads();
  wait_for_previous_kernel();

  constexpr int kStages = T::kStages;
  int const stages = (t.columns + kDepth - 1) / kDepth;
  SharedAddress const ring = shared_address(shared);
#pragma unroll 1
  for (int i = 0; i < kStages - 1; ++i) {
    if (i < stages) T::ask(t, here, windows, ring + i * T::kStageBytes);
    commit_copies();
  }
  int const first_row = warp / (T::kTileN / T::kWarpColumns) * T::kWarpRows;
  int const first_column = warp % (T::kTileN / T::kWarpColumns) * T::kWarpColumns;
  typename T::Sums sums;
  T::start(sums, t, here, first_column);
  int read = 0, write = (kStages - 1) * T::kStageBytes;
#pragma unroll 1
  for (int i = 0; i < stages; ++i) {
    wait_for_copies<kStages - 2>();
    __syncthreads();  // everyone's copies have come; and everyone has read the stage that is asked for next
    if (i + kStages - 1 < stages) T::ask(t, here, windows, ring + write);
    commit_copies();
    T::multiply(sums, ring + read, first_row, first_column);
    write = read;
    read = read + T::kStageBytes == T::kRingBytes ? 0 : read + T::kStageBytes;
  }
  wait_for_copies<0>();
  __syncthreads();  // the ring makes room for the slabs
  T::finish_as(sums, t, here, reinterpret_cast<int*>(shared + warp * T::kSlabBytes), first_row, first_column);
}

template <int kRow>
void launch_tiled(TiledProblem const& t, unsigned blocks, int device, Stream stream) {
  static constexpr TileConfig kTile = kTiles[kRow];
  using T = Tiled<kTile.warp_m, kTile.warp_n, kTile.warps_m, kTile.warps_n, kTile.stages, kTile.vector, kTile.blocks>;
  static_assert(T::kRingBytes + T::kTileM * static_cast<int>(sizeof(Window)) == kTile.shared_bytes());
  auto* const kernel = tiled_kernel<T>;
  static PerDevice prepared;
  prepared.once(device, [kernel] {
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kTile.shared_bytes()),
               "asking for shared memory");
  });
  dim3 const grid(blocks, t.problem.shape.groups);
  cuda_check(launch_dependent(kernel, grid, T::kThreads, kTile.shared_bytes(), stream, t),
             "launching epiloq.conv2d_int8");
}

}  // namespace epiloq::ops::conv2d_int8
