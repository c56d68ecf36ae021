#pragma once

// SM90 WGMMA GEMM of online_quant_mm (W4A8/W8A8) with quantisation blocks of 128, for large M: weights are the first
// operand, so that D^T is computed.
//
// Persistent over tiles of 128 weight rows; if there are few tiles, or few in the last wave, the CTAs of a cluster
// split K. Two producer threads load one quantisation block of K per stage with TMA; two consumer warpgroups multiply
// 64 weight rows each and unpack 4-bit weights first.
//
// Dequantising the int8 sums costs more than computing them: a conversion and three multiply-adds each, and two loads
// of a token's parameters. So tensor cores do most of it: a parameter is split into two TF32 parts, and products of
// depth 8 of those parts,
//
//   [scale_w | 0] [scale_x | scale_x]^T   and   [total_w | offset_w] [offset_x | scale_x sum(q_x)]^T,
//
// yield the scale of every sum and add the offsets' part; a conversion and one multiply-add remain. Weights without
// offsets use the second product for two blocks at a time: [total_w | total_w'] [offset_x | offset_x']^T.

#include <algorithm>

#include "core/cuda_check.h"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "epiloq/device.h"
#include "kernels/common/device_code.cuh"
#include "kernels/common/params_cache.h"
#include "kernels/common/ptx/tma.cuh"
#include "kernels/sm90/online_quant/online_quant_mainloop.cuh"
#include "kernels/sm90/online_quant/online_quant_producer.cuh"
#include "kernels/sm90/online_quant/online_quant_store.cuh"

namespace epiloq::gemm {

__device__ __forceinline__ void prefetch_maps(OnlineQuantSm90Params const& params) {
  cute::prefetch_tma_descriptor(&params.values.maps[0]);
  cute::prefetch_tma_descriptor(&params.values.maps[1]);
  if (params.stores_boxes) cute::prefetch_tma_descriptor(&params.output);
}

template <class T>
__device__ void multiply_tiles(OnlineQuantSm90Params const& params, typename T::Shared const& shared, int group) {
  using Mainloop = OnlineQuantSm90Mainloop<T>;
  typename Mainloop::StageAddresses const of(shared, params.p, group, threadIdx.x % T::kGroupThreads);
  typename T::TileScheduler const scheduler(params.p);
  OnlineQuantSm90Store<T> const store(params, shared, group);
  typename T::State at;
  if (T::kPingpong && group == 1) Mainloop::order_arrive(group);
  for (int tile = scheduler.first(); tile < scheduler.tiles; tile = scheduler.after(tile)) {
    float sums[Mainloop::kSums] = {};
    Mainloop::sum(sums, of, at, scheduler.steps(tile));
    store.store(sums, typename T::TileOrigin(params.p, tile), scheduler.is_split(tile));
  }
  store.finish();
}

// One warp, before the CTA's barrier: memory idles until the first load. Weights need not wait for the quantising
// kernel, which waited for whoever wrote them before it triggered this one.
template <class T>
__device__ __forceinline__ void start(OnlineQuantSm90Params const& params, typename T::Shared const& shared) {
  if (elect_one()) {
    for (int stage = 0; stage < T::kStages; ++stage) {
      mbarrier_init(shared.full + stage * 8, T::kFullArrivals);
      mbarrier_init(shared.empty + stage * 8, T::kEmptyArrivals);
    }
    cutlass::arch::fence_barrier_init();
    OnlineQuantSm90Copies<T>::fill_early(params, OnlineQuantSm90Copies<T>::weights(shared, params));
    if (typename T::TileScheduler(params.p).has_split_tile()) OnlineQuantSm90SplitK<T>::expect(shared);
  }
  __syncwarp();
}

template <class T>
__device__ __forceinline__ void fill_stages(OnlineQuantSm90Params const& params, typename T::Shared const& shared,
                                            int warp) {
  using Copies = OnlineQuantSm90Copies<T>;
  if (warp == 0 && elect_one()) {
    Copies::fill_others(shared, params, Copies::early(params), Copies::weights(shared, params));
  } else if (warp == 1 && elect_one()) {
    pdl_wait();
    Copies::fill_others(shared, params, 0, Copies::tokens(shared, params));
  }
  if (!typename T::TileScheduler(params.p).has_split_tile()) return;
  __syncwarp();
  cluster_arrive();  // where the others do
  cluster_wait();
}

template <class T>
__global__ __launch_bounds__(T::kThreads,
                             1) void online_quant_sm90_kernel(__grid_constant__ OnlineQuantSm90Params const params) {
  extern __shared__ unsigned char memory[];
  typename T::Shared const shared(memory);
  int const group = warp_uniform(threadIdx.x / T::kGroupThreads),
            warp = warp_uniform(threadIdx.x % T::kGroupThreads / 32);
  bool const copies = group == T::kGroups;
  if (copies && warp == 0) start<T>(params, shared);
  if (copies && warp == 1 && elect_one()) prefetch_maps(params);
  __syncthreads();
  pdl_trigger();
  if (copies) {
    if constexpr (T::kReallocatesRegisters) cutlass::arch::warpgroup_reg_dealloc<T::kProducerRegisters>();
    fill_stages<T>(params, shared, warp);
  } else {
    if constexpr (T::kReallocatesRegisters) cutlass::arch::warpgroup_reg_alloc<T::kConsumerRegisters>();
    multiply_tiles<T>(params, shared, group);
  }
}

template <int kTokens, int kBits>
struct OnlineQuantSm90Gemm {
  using T = OnlineQuantSm90Tile<kTokens, kBits>;

  static void launch(OnlineQuantGemmProblem const& p, int device, Stream stream) {
    auto* const kernel = online_quant_sm90_kernel<T>;
    static PerDevice prepared;
    prepared.allow_shared(kernel, T::kSharedBytes, device);
    thread_local ParamsCache<OnlineQuantGemmProblem, OnlineQuantSm90Params> cache;
    auto const& params =
        cache.get(cache_key(p.a, p.b, p.out), p, device, [&] { return OnlineQuantSm90Copies<T>::params_of(p); });
    int const at_once = device_properties(device).sm_count / p.split, tiles = T::tiles(p);
    int const blocks = p.split > 1 && p.whole == 0 ? tiles : std::min(tiles, at_once);
    cuda_check(launch_pdl_clusters(kernel, dim3(blocks, p.split), dim3(1, p.split), T::kThreads, T::kSharedBytes,
                                   stream, params),
               "launching epiloq.online_quant_mm");
  }
};

}  // namespace epiloq::gemm
