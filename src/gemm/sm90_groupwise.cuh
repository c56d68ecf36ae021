#pragma once

// float8 GEMM for SM90 with scales every 128 of K, and int8 and float8 GEMM of experts with scales of whole rows,
// written on wgmma and TMA rather than CUTLASS's collective, which has no epilogue of ours, no tiles narrower than 128
// weights and no experts.
//
// Tokens are the rows of wgmma's tile, whatever their number: a box of the tokens there are is all that TMA reads, so a
// tile of few tokens costs their bytes and no more, and its width in weights is free to fill the SMs evenly. Each 128
// of K is multiplied into fresh accumulators and added to the sums in fp32 with its scales. Warpgroups stand side by
// side along M, or take turns along K where there is little to multiply and latency is what counts. A cluster's blocks
// may share tokens (blocks beside each other along N) or weights (along M), each reading its part for all.

#include <cutlass/arch/reg_reconfig.h>

#include <algorithm>
#include <atomic>

#include "epiloq/device.h"
#include "gemm/params_cache.h"
#include "gemm/sm90_groupwise_math.cuh"
#include "gemm/sm90_groupwise_read.cuh"
#include "gemm/sm90_groupwise_store.cuh"

namespace epiloq::gemm {

template <class C>
__device__ void multiply_tiles(GroupwiseParams const& params, typename C::Shared const& shared, int group, int warp,
                               int lane) {
  using Math = GroupwiseMath<C>;
  int const group_m = C::kKGroups > 1 ? 0 : group, group_k = C::kKGroups > 1 ? group : 0;
  int const depth = (params.p.k + kGroupDepth - 1) / kGroupDepth;
  int before = 0;  // steps of the tiles that are done
  GroupwiseScheduler<C> scheduler(params.p);
  for (GroupwiseTile tile; scheduler.next(tile); before += depth) {
    typename C::Sum sums[C::kRounds][Math::kSums] = {};
    int const boundary = kGroupDepth - tile.first_column % kGroupDepth;
    int const steps = (depth - group_k + C::kKGroups - 1) / C::kKGroups;
    Math::sum(sums, {shared, RingPosition<C>(before + group_k), group_m, boundary, warp, lane}, steps);
    if constexpr (C::kKGroups > 1) Math::meet(sums[0], reinterpret_cast<typename C::Sum*>(shared.partial()), group_k);
    if (group_k == 0) {
      unsigned char* const staging = shared.staging() + (group_m * 4 + warp) * 16 * C::kPitch;
#pragma unroll
      for (int round = 0; round < C::kRounds; ++round) {
        int const row_in_tile = (group_m * C::kRounds + round) * 64 + warp * 16;
        if constexpr (C::kWholeRows) {
          float scaled[Math::kSums];
          GroupwiseStore<C>::scale(scaled, sums[round], params.p, tile, row_in_tile, lane);
          GroupwiseStore<C>::tile(scaled, params.p, tile, staging, row_in_tile, lane);
        } else {
          GroupwiseStore<C>::tile(sums[round], params.p, tile, staging, row_in_tile, lane);
        }
      }
    }
  }
}

template <class C>
__global__ __launch_bounds__(C::kThreads, 1) void groupwise_kernel(__grid_constant__ GroupwiseParams const params) {
  extern __shared__ unsigned char raw[];
  typename C::Shared const shared(raw);
  int const group = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
  int const lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages; ++i) {
      shared.full()[i].init(C::kFullArrivals);
      shared.empty()[i].init(C::kEmptyArrivals);
    }
    cutlass::arch::fence_barrier_init();
  }
  if constexpr (C::kCluster > 1) {
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();
  } else {
    __syncthreads();
  }
  TileReader<C> const reader{params, shared};
  bool const reads_tiles = group == C::kMathGroups && warp < C::kReaders && lane == 0;
  if (reads_tiles && warp == 0) reader.prefetch();
  wait_for_previous_kernel();
  if (group == C::kMathGroups) {
    if constexpr (C::kMovesRegisters) cutlass::arch::warpgroup_reg_dealloc<C::kReadRegisters>();
    if (reads_tiles) reader.run(warp);
    if (!C::kWholeRows && warp >= 2 && warp < 2 + C::kReaders) read_scales<C>(params, shared, warp - 2, lane);
    let_next_kernel_start();
  } else {
    if constexpr (C::kMovesRegisters) cutlass::arch::warpgroup_reg_alloc<C::kMathRegisters>();
    multiply_tiles<C>(params, shared, group, warp, lane);
  }
  if constexpr (C::kCluster > 1) {  // others' TMA may still write here, and their releases arrive here
    __syncwarp();
    cute::cluster_arrive();
    cute::cluster_wait();
  }
}

template <class C>
struct GroupwiseGemm {
  static GroupwiseParams params_of(GroupwiseProblem const& p) {
    constexpr int kEight = 8;  // rows of the swizzle's pattern
    int const token_box = C::kShare == Share::kTokens || p.m >= C::kM ? C::kM : (p.m + kEight - 1) / kEight * kEight;
    int const token_part = C::kShare == Share::kTokens ? token_box / C::kCluster : token_box;
    int const weight_part = C::kShare == Share::kWeights ? C::kN / C::kCluster : C::kN;
    std::int64_t const token_rows = p.masked_m != nullptr ? std::int64_t{p.experts} * p.m : p.m;
    return {tensor_map_of(p.a, token_rows, p.k, p.stride_a, token_part),
            tensor_map_of(p.b, std::int64_t{p.experts} * p.n, p.k, p.stride_b, weight_part), p, token_box};
  }

  static cudaLaunchConfig_t launch_config(cudaLaunchAttribute (&attributes)[2], int blocks, Stream stream) {
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {C::kCluster, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = blocks;
    config.blockDim = C::kThreads;
    config.dynamicSmemBytes = C::kSharedBytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = C::kCluster > 1 ? 2 : 1;
    return config;
  }

  // Blocks that run at once on a device; found out, with the kernel's attributes set, when it is first used there.
  static int resident_blocks(int device) {
    static std::atomic<int> known[64];
    int blocks = known[device].load(std::memory_order_acquire);
    if (blocks != 0) return blocks;
    auto* const kernel = groupwise_kernel<C>;
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes),
               "asking for shared memory");
    blocks = device_properties(device).sm_count;
    if constexpr (C::kCluster > 1) {
      cudaLaunchAttribute attributes[2];
      cudaLaunchConfig_t config = launch_config(attributes, C::kCluster, nullptr);
      config.attrs = attributes + 1;
      config.numAttrs = 1;
      int clusters = 0;
      cuda_check(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config), "asking for clusters");
      blocks = clusters * C::kCluster;
    }
    known[device].store(blocks, std::memory_order_release);
    return blocks;
  }

  static void launch(GroupwiseProblem const& p, int device, Stream stream) {
    thread_local ParamsCache<GroupwiseProblem, GroupwiseParams> cache;
    auto const& params = cache.get(cache_key(p.a, p.b, p.d), p, device, [&] { return params_of(p); });
    auto const tiles = [](std::int64_t size, int tile) { return (size + tile - 1) / tile; };
    std::int64_t blocks = resident_blocks(device);
    if (p.offs == nullptr && p.masked_m == nullptr) {
      int const rows = C::kM * (C::kShare == Share::kWeights ? C::kCluster : 1);
      int const columns = C::kN * (C::kShare == Share::kTokens ? C::kCluster : 1);
      blocks = std::min(blocks, tiles(p.m, rows) * tiles(p.n, columns) * C::kCluster);
    }
    cudaLaunchAttribute attributes[2];
    auto const config = launch_config(attributes, static_cast<int>(blocks), stream);
    cuda_check(cudaLaunchKernelEx(&config, groupwise_kernel<C>, params), "launching epiloq.groupwise_mm");
  }
};

}  // namespace epiloq::gemm
