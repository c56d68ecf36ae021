#pragma once

// int8 convolution as an implicit GEMM on tensor cores: wgmma on SM90, mma.sync from SM75 on.
//
// A CTA owns a tile of output pixels by output channels and walks along the columns of im2col.h in stages filled by
// cp.async; the CTAs of a cluster split the columns. Taps outside the image are not copied: the input's zero point is
// stored in their place, which is exact at every border and costs nothing in the interior.
//
// Copies are 16 channels wide if a group's channels allow it, else 4, else single bytes (an image's 3 channels).

#include "kernels/conv2d/int8_config.h"
#include "kernels/conv2d/int8_split_k.cuh"

namespace epiloq::ops::conv2d_int8 {

// Integers rather than a TileConfig: nvcc 13.0 cannot name a structural value in the stub of a __global__ template.
template <Mma kMma, int kWarpM_, int kWarpN_, int kWarpsM, int kWarpsN_, int kDepth_, int kStages_, int kBytes_,
          int kBlocks_>
struct Tiled {
  static constexpr int kWarpM = kWarpM_, kWarpN = kWarpN_, kWarpsN = kWarpsN_;
  static constexpr int kTileM = kWarpM * kWarpsM, kTileN = kWarpN * kWarpsN;
  static constexpr int kDepth = kDepth_, kStages = kStages_, kBytes = kBytes_;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  static constexpr int kBlocks = 2;  // more do not fit SM75's shared memory
#else
  static constexpr int kBlocks = kBlocks_;
#endif
  static constexpr int kB = kTileM * kDepth;  // offset of the weights in a stage
  static constexpr int kStageBytes = (kTileM + kTileN) * kDepth;
  using Mainloop = typename MainloopOf<kMma>::template Of<Tiled>;
  static constexpr int kThreads = Mainloop::kMmaThreads * kWarpsM * kWarpsN;
  using Copies = std::conditional_t<kBytes == 1, ByteCopies<Tiled>, WideCopies<Tiled>>;
};

// Initialises the sums with the input zero point's correction, in one CTA of a cluster.
template <class T>
__device__ __forceinline__ void start(typename T::Mainloop::Sums& sums, TiledProblem const& t, CtaTile<T> const& tile,
                                      int first_column) {
  int const neighbours = threadIdx.x % 4 * 2;
#pragma unroll
  for (int j = 0; j < T::Mainloop::kColumns; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const n = channel_of(first_column + 8 * j + neighbours + i);
      bool const is_valid = n < tile.count_n && blockIdx.z == 0;
      unsigned const first = is_valid ? first_sum(t.problem.finish, tile.group * t.outputs + tile.first_n + n) : 0u;
#pragma unroll
      for (auto& row : sums) row[4 * j + i] = row[4 * j + 2 + i] = first;
    }
  }
}

template <class T>
__device__ __forceinline__ void multiply(typename T::Mainloop::Sums& sums, TiledProblem const& t,
                                         typename T::Copies& copies, SharedAddress first_stage, int stages,
                                         int warp_row, int warp_column) {
  using Mainloop = typename T::Mainloop;
  constexpr int kAhead = Mainloop::kAhead, kPipelineBytes = T::kStages * T::kStageBytes;
  int read = 0, write = kAhead * T::kStageBytes, left = stages;
  do {  // there is at least one stage: a path around the loop would make the compiler move sums that wgmma is using
    cp_async_wait<kAhead - 1>();
    Mainloop::publish();
    __syncthreads();  // all copies have landed, and the stage to be refilled has been read
    Mainloop::begin(sums, first_stage + read, warp_row, warp_column);
    if (left > kAhead) copies.issue(t, first_stage + write);
    cp_async_commit();
    Mainloop::end(sums, first_stage + read, warp_row, warp_column);
    read = read + T::kStageBytes == kPipelineBytes ? 0 : read + T::kStageBytes;
    write = write + T::kStageBytes == kPipelineBytes ? 0 : write + T::kStageBytes;
  } while (--left > 0);
  Mainloop::wait_for_all(sums);
  cp_async_wait<0>();
}

// CTAs along x take tiles, channels fastest, so that CTAs of the same pixels run together; along y groups; along z, a
// cluster, they split the columns.
template <class T, int kPipelineBytes>
__global__ __launch_bounds__(T::kThreads, T::kBlocks) void tiled_kernel(__grid_constant__ TiledProblem const t) {
  extern __shared__ __align__(1024) unsigned char shared[];
  auto* const windows = reinterpret_cast<conv2d::Window*>(shared + kPipelineBytes);
  CtaTile<T> const tile(t);
  pdl_trigger();
  for (int row = threadIdx.x; row < T::kTileM; row += T::kThreads) {
    windows[row] = conv2d::window_of(t.problem.shape, tile.first_m + row);
  }
  __syncthreads();
  typename T::Copies copies(t, tile, windows);
  pdl_wait();
  SharedAddress const first_stage = shared_address(shared);
#pragma unroll 1
  for (int i = 0; i < T::Mainloop::kAhead; ++i) {
    if (i < tile.stages) copies.issue(t, first_stage + i * T::kStageBytes);
    cp_async_commit();
  }
  int const warp = __shfl_sync(~0u, threadIdx.x / T::Mainloop::kMmaThreads, 0);  // or warpgroup
  int const warp_row = warp / T::kWarpsN, warp_column = warp % T::kWarpsN, first_column = warp_column * T::kWarpN;
  typename T::Mainloop::Sums sums;
  start<T>(sums, t, tile, first_column);
  multiply<T>(sums, t, copies, first_stage, tile.stages, warp_row, warp_column);
  __syncthreads();  // the sums replace the stages
  SumsInShared<T> const all_sums(shared);
  all_sums.put(sums);
  if (gridDim.z > 1) cluster_sync();
  finish(all_sums, t, tile, T::Mainloop::first_row(warp_row), first_column);
  if (gridDim.z > 1) cluster_sync();  // other CTAs may still read this one's sums
}

}  // namespace epiloq::ops::conv2d_int8
