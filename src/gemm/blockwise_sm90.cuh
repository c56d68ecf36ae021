#pragma once

// The product of blockwise.cuh for SM90 and blocks of 128, for many tokens: weights first, so that D^T is computed.
//
// A thread block stays on its SM and takes tile after tile of 128 weight rows; where there are few tiles the blocks of
// a cluster share K. Two threads copy with TMA into a ring of stages of one block of K each; two groups of four warps
// multiply 64 weight rows each with wgmma, and unpack those of 4 bits first.
//
// What costs time is not int8 products but de-quantising their sums: a conversion and three multiply-adds each, and
// two loads of a token's parameters, whose way from shared memory to registers is as wide as a warp. So tensor cores
// do that too. A parameter is split into two tf32 parts, and products of depth 8 of those parts,
//
//   [scale_w | 0] [scale_x | offset_x]^T   and   [total_w | offset_w] [offset_x | scale_x sum(q_x)]^T,
//
// give every sum's scale, and add the offsets' part to the sums: a conversion and one multiply-add remain. H200,
// 2026-11-21, 4096 x 4096 without offsets by 4096 tokens: 199 us instead of 235; with offsets by 1024: 48.5 instead of
// 75.1. In forerunners tensor cores were at work for 56 to 59 % of the time (ncu), and adding up waited for the
// register file, which their sums share. (Two blocks' sums in turn would not wait for wgmma, but ptxas does where
// others than wgmma change what it adds to: C7518.)

#include <algorithm>

#include "core/cluster.cuh"
#include "core/cuda_check.h"
#include "core/device_code.cuh"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "epiloq/device.h"
#include "gemm/blockwise_sm90_copies.cuh"
#include "gemm/blockwise_sm90_math.cuh"
#include "gemm/params_cache.h"
#include "gemm/tma.cuh"

namespace epiloq::gemm {

// Turns D^T into rows of D, some tokens at a time.
template <class T>
__device__ void store_tile(BlockwiseProblem const& p, float const (&sums)[T::kTokens / 2], float* mine,
                           typename T::Place const& place, int group, int warp, int lane) {
  auto const wait_for_group = [group] {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(T::kGroupThreads) : "memory");
  };
#pragma unroll
  for (int chunk = 0; chunk < T::kTokens / T::kChunk; ++chunk) {
    wait_for_group();
#pragma unroll
    for (int i = 0; i < T::kChunk / 2; ++i) {
      int const token = i / 4 * 8 + 2 * (lane % 4) + i % 2, row = 16 * warp + i / 2 % 2 * 8 + lane / 4;
      mine[token * T::Finish::kPitch + row] = sums[chunk * T::kChunk / 2 + i];
    }
    wait_for_group();
    T::Finish::store(p, mine, place.first_m + chunk * T::kChunk, place.first_n + group * T::kGroupRows);
  }
}

// Blocks of a cluster add their sums up in shared memory, in place of the ring; they have one tile each.
template <class T>
__device__ void store_together(BlockwiseProblem const& p, float const (&sums)[T::kTokens / 2], float* all_sums,
                               typename T::Place const& place, int group, int warp, int lane) {
  auto const wait_for_groups = [] { asm volatile("bar.sync 1, %0;" ::"n"(T::kGroups * T::kGroupThreads) : "memory"); };
  wait_for_groups();  // the ring makes room for the sums
#pragma unroll
  for (int i = 0; i < T::kTokens / 2; ++i) {
    int const token = i / 4 * 8 + 2 * (lane % 4) + i % 2;
    int const row = group * T::kGroupRows + 16 * warp + i / 2 % 2 * 8 + lane / 4;
    all_sums[token * T::ClusterFinish::kPitch + row] = sums[i];
  }
  wait_for_cluster();
  T::ClusterFinish::store_of_cluster(p, all_sums, place.first_m, place.first_n, blockIdx.y, gridDim.y);
  wait_for_cluster();  // others may still read this block's sums
}

template <class T>
__device__ void multiply_tiles(BlockwiseProblem const& p, typename T::Shared const& shared, int group) {
  using Math = BlockwiseSm90Math<T>;
  int const warp = uniform(threadIdx.x / 32 % 4), lane = threadIdx.x % 32;
  typename Math::Share const of(shared, p, group, threadIdx.x % T::kGroupThreads);
  typename T::Share const share(p);
  typename T::Ring at;
  if (group == 1) Math::pass_turn(group);
  for (int tile = share.first_tile; tile < share.tiles; tile += share.stride) {
    float sums[Math::kSums] = {};
    Math::sum(sums, of, at, share.steps);
    typename T::Place const place(p, tile);
    if (gridDim.y == 1) {
      store_tile<T>(p, sums, shared.sums + group * T::Finish::kSharedBytes / 4, place, group, warp, lane);
    } else {
      store_together<T>(p, sums, shared.all_sums, place, group, warp, lane);
    }
  }
}

template <class T>
__device__ void fill_stages(BlockwiseSm90Params const& params, typename T::Shared const& shared) {
  using Copies = BlockwiseSm90Copies<T>;
  int const warp = uniform(threadIdx.x % T::kGroupThreads / 32);
  if (warp == 0 && is_elected()) {
    // Weights need not wait for the quantising kernel: it waited for whoever wrote them before it let this one start.
    Copies::copy_weights(shared, params);
  } else if (warp == 1 && is_elected()) {
    wait_for_previous_kernel();
    Copies::copy_tokens(shared, params);
  }
  if (gridDim.y == 1) return;
  wait_for_cluster();
  wait_for_cluster();
}

template <class T>
__global__ __launch_bounds__(T::kThreads,
                             1) void blockwise_sm90_kernel(__grid_constant__ BlockwiseSm90Params const params) {
  extern __shared__ unsigned char memory[];
  typename T::Shared const shared(memory);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < T::kStages; ++stage) {
      init_barrier(shared.full + stage * 8, T::kFullArrivals);
      init_barrier(shared.empty + stage * 8, T::kEmptyArrivals);
    }
    cutlass::arch::fence_barrier_init();
  }
  // Weights without offsets multiply the third kind of the tokens' parameters by zeros, which nobody copies then.
  for (int i = threadIdx.x; i < T::kStages * T::kTokenParts / 4; i += T::kThreads) shared.all_parts[i] = 0;
  fence_stored();
  __syncthreads();
  let_next_kernel_start();
  int const group = uniform(threadIdx.x / T::kGroupThreads);
  if (group == T::kGroups) {
    cutlass::arch::warpgroup_reg_dealloc<T::kCopyRegisters>();
    fill_stages<T>(params, shared);
  } else {
    cutlass::arch::warpgroup_reg_alloc<T::kProductRegisters>();
    multiply_tiles<T>(params.p, shared, group);
  }
}

template <int kTokens, int kBits>
struct BlockwiseSm90Gemm {
  using T = BlockwiseSm90Tile<kTokens, kBits>;

  static void launch(BlockwiseProblem const& p, int device, Stream stream) {
    auto* const kernel = blockwise_sm90_kernel<T>;
    static PerDevice prepared;
    prepared.once(device, [kernel] {
      cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, T::kSharedBytes),
                 "asking for shared memory");
    });
    thread_local ParamsCache<BlockwiseProblem, BlockwiseSm90Params> cache;
    auto const& params =
        cache.get(cache_key(p.a, p.b, p.out), p, device, [&] { return BlockwiseSm90Copies<T>::params_of(p); });
    int const blocks = p.split > 1 ? T::tiles(p) : std::min(T::tiles(p), device_properties(device).sm_count);
    cuda_check(launch_dependent_clusters(kernel, dim3(blocks, p.split), dim3(1, p.split), T::kThreads, T::kSharedBytes,
                                         stream, params),
               "launching epiloq.online_quant_mm");
  }
};

}  // namespace epiloq::gemm
