#pragma once

// SM90 groupwise GEMM: FP8 with a scale every 128 of K, and int8 or FP8 with per-row scales, with or without experts.
// Written on wgmma and TMA: CUTLASS's collective with scales per block supports neither our epilogues, nor tiles
// narrower than 128, nor experts.
//
// Warp-specialised: a producer warpgroup (groupwise_producer.cuh, groupwise_scale_producer.cuh) fills the stages;
// consumer warpgroups (groupwise_mainloop.cuh) multiply, promote to FP32 and store (groupwise_epilogue.cuh,
// groupwise_store.cuh). Tokens are the rows of wgmma's tile: TMA reads only rows that exist, so that a tile costs only
// the bytes of its tokens, and the tile width can be chosen to fill the SMs evenly. With kTransposesD the launch swaps
// A and B to compute D^T, so that names say "token" for rows of the weight and "weight" for tokens: a thread then holds
// two weight scales per K step instead of one per column. Consumer warpgroups are arranged along M, or along K for
// small M, where latency dominates. The kernel is persistent over tiles. If there are too few tiles for all SMs, or too
// few in the last wave, two CTAs split K (groupwise_split_k.cuh).

#include <cutlass/arch/reg_reconfig.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "epiloq/device.h"
#include "kernels/common/params_cache.h"
#include "kernels/common/ptx/cta.cuh"
#include "kernels/sm90/groupwise_mainloop.cuh"
#include "kernels/sm90/groupwise_scale_producer.cuh"
#include "kernels/sm90/groupwise_store.cuh"

namespace epiloq::gemm {

// A consumer warpgroup's persistent loop over tiles: main loop, exchange of sums where K is split, epilogue and store.
// `group`: of the consumer warpgroups; `warp`: of its four.
template <class C>
__device__ void multiply_tiles(GroupwiseParams const& params, typename C::Shared const& shared, int group, int warp,
                               int lane) {
  using Mainloop = GroupwiseMainloop<C>;
  int const group_m = C::kKGroups > 1 ? 0 : group, group_k = C::kKGroups > 1 ? group : 0;
  KRange<C> const k_range(params);
  typename Mainloop::StageAddresses addresses(params, shared, group_m, group_k, warp, lane, k_range.first_of_all());
  int const first_row = group_m * 64 + warp * 16 + group_k * C::kWarpRows;  // of the tile: the warp's in the epilogue
  GroupwiseStore<C> out(params, shared, group * 4 + warp, first_row, lane);
  int before = 0;  // K steps of the tiles done so far
  // After the main loop: completes the sums of split K, and stores, unless the other CTA does that for these rows.
  auto const finish = [&](auto& sums, GroupwiseTile const& tile, int depth, bool is_last) {
    typename GroupwiseStore<C>::Exchange exchange{};
    if constexpr (C::kMaySplitK) {
      if (k_range.is_split(tile)) {
        bool const has_rows = warp_uniform(tile.first_row + first_row < tile.end_row);
        if constexpr (C::kSplitsLastWave) {
          exchange = {params, shared, group * 4 + warp, lane, has_rows};
        } else {
          RowExchange<C> const rows(shared, group * 4 + warp, lane, warp_uniform(KRange<C>::rank_in(params)));
          if (!rows.reduce(sums[0], has_rows)) return;
        }
      }
    }
    out.store(sums, tile, is_last || depth <= C::kParts, exchange);
  };
  // Finding the next tile takes some 200 cycles, so with deferred stores it is done during this tile's last K step.
  GroupwiseScheduler<C> scheduler(params.p, params.tiles);
  GroupwiseTile tile, following{};
  for (bool more = scheduler.next(tile); warp_uniform(more); tile = following) {
    int const depth = k_range.depth(tile), steps = (depth - group_k + C::kKGroups - 1) / C::kKGroups;
    typename C::Sum sums[C::kRounds][Mainloop::kSums] = {};
    // Columns of the tile before the next 128-column scale group.
    int const boundary = in_register(kBlockColumns - tile.first_column % kBlockColumns);
    if constexpr (C::kMulticast) addresses.select_empty(warp_uniform(tile.is_alone));
    out.load_operands(tile);
    // What the main loop does while products are in flight: stores parts of the previous tile, finds the next one.
    auto const store_part = [&] { out.store_pending(); };
    auto const fetch_next_tile = [&] { more = scheduler.next(following); };
    auto const fill = [&] {
      if constexpr (C::kFillsSlotsEarly) out.fill_first_round(sums, tile);
    };
    Mainloop::sum(sums, addresses, Position<C>(before + group_k), steps, boundary, store_part, fetch_next_tile, fill);
    out.await_operands();
    if constexpr (C::kKGroups == 1) {
      finish(sums, tile, depth, C::kDefersStores && !more);
    } else {
      typename C::Sum of_rows[1][C::kRowSums] = {};
      Mainloop::reduce(of_rows[0], sums[0], reinterpret_cast<typename C::Sum*>(shared.partial()), group_k,
                       warp_uniform(before > 0));
      finish(of_rows, tile, depth, false);
    }
    before += depth;
    if constexpr (!C::kDefersStores) fetch_next_tile();
  }
  out.finish();
}

template <class C>
__global__ __launch_bounds__(C::kThreads, 1) void groupwise_kernel(__grid_constant__ GroupwiseParams const params) {
  typename C::Shared const shared(dynamic_smem);
  int const group = warp_uniform(threadIdx.x / 128), warp = warp_uniform(threadIdx.x / 32 % 4);
  int const lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages; ++i) {
      shared.full()[i].init(C::full_arrivals(params));
      shared.empty()[i].init(C::kEmptyArrivals);
    }
    for (int i = 0; C::kMaySplitK && i < C::kConsumerWarps; ++i) shared.received()[i].init(1);
    // One fence, by the one thread that initialised all barriers.
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  bool const in_cluster = (C::kMulticast && params.tiles.multicast) || (C::kMaySplitK && params.p.split_k > 1);
  if (in_cluster) cluster_arrive();
  // Before the preceding kernel has finished (PDL): weights, if that kernel cannot be writing them, or prefetches.
  TileProducer<C> const producer(params, shared);
  int early = 0;  // K steps whose weights have been issued
  if (C::kSmallM && params.p.constant_b) {
    if (group == C::kConsumerGroups && warp < C::kProducerWarps) early = producer.issue_early(warp);
  } else if (group == C::kConsumerGroups && warp == 0 && elect_one()) {
    producer.prefetch();
  }
  pdl_trigger();
  if (in_cluster) {  // until the other CTA's barriers are initialised
    __syncwarp();
    cluster_wait();
  }
  pdl_wait();
  if (group == C::kConsumerGroups) {  // the last warpgroup is the producer
    if constexpr (C::kReallocatesRegisters) cutlass::arch::warpgroup_reg_dealloc<C::kProducerRegisters>();
    if constexpr (C::kSeparateProducers) {
      producer.run_separate(warp >= C::kProducerWarps, warp % C::kProducerWarps, early);
    } else {
      if (warp < C::kProducerWarps) producer.run(warp, early);
    }
    // Scale warps, kScaleWarps per producer warp that does not load scales itself.
    int const scale_warp = warp - C::kProducerWarps, part = scale_warp / C::kProducerWarps;
    if (C::kMayCopyAllScales && params.copies_all_scales) {
      if (scale_warp >= 0) copy_all_scales<C>(producer, scale_warp);
    } else if (!C::kPerRowScales && !C::producer_loads_scales(params) && scale_warp >= 0 && part < C::kScaleWarps) {
      read_scales<C>(params, shared, producer.k_range, scale_warp % C::kProducerWarps, part * 32 + lane);
    }
  } else {
    if constexpr (C::kReallocatesRegisters) cutlass::arch::warpgroup_reg_alloc<C::kConsumerRegisters>();
    multiply_tiles<C>(params, shared, group, warp, lane);
  }
}

template <class C>
struct GroupwiseGemm {
  static GroupwiseParams params_of(GroupwiseProblem const& p, int sm_count) {
    std::int64_t const token_rows = p.masked_m != nullptr ? std::int64_t{p.experts} * p.m : p.m;
    int const split_count = p.split_k == 1 ? 0 : split_tile_count(p, sm_count);
    GroupwiseParams params{};
    params.tokens = row_tiles_of(p.a, token_rows, p.k, p.stride_a, C::kM, p.m, is_dense(p));
    params.weights = row_tiles_of(p.b, std::int64_t{p.experts} * p.n, p.k, p.stride_b, C::kN, p.n);
    params.has_experts = !is_dense(p);
    for (int i = 0; C::kSmallM && params.has_experts && i < kFewRowsBoxes; ++i) {
      params.few_tokens[i] = tensor_map_of(p.a, token_rows, p.k, p.stride_a, kFewestRows << i);
    }
    params.p = p;
    params.tiles = GroupwiseScheduler<C>::tiles_of(p, split_count, multicast(p, sm_count));
    params.copies_scales = C::kProducerMayLoadScales && can_copy_scales(p);
    params.copies_all_scales = may_copy_all_scales(p, sm_count);
    params.stores_boxes = GroupwiseStore<C>::can_store_boxes(p);
    params.steps_of_first = steps_of_first(p);
    if (params.copies_scales || params.copies_all_scales) {
      params.scales = encode_tensor_map(
          p.scale_a.ptr,
          {static_cast<std::uint64_t>(token_rows), static_cast<std::uint64_t>(p.k + kGroupDepth - 1) / kGroupDepth},
          {std::uint64_t{4} * p.scale_a.stride_k}, {static_cast<std::uint32_t>(params.tokens.boxes[0]), 1},
          CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_DATA_TYPE_FLOAT32);
    }
    if (params.copies_all_scales) {
      auto const blocks = [](int size) { return static_cast<std::uint64_t>(tiles(size, kGroupDepth)); };
      params.weight_scales =
          encode_tensor_map(p.scale_b.ptr, {blocks(p.k), blocks(p.n)}, {std::uint64_t{4} * p.scale_b.stride_row},
                            {C::kQuad, 2}, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_DATA_TYPE_FLOAT32);
    }
    if (params.tiles.multicast) params.half = tensor_map_of(p.a, token_rows, p.k, p.stride_a, C::kM / 2);
    if (params.stores_boxes) {
      constexpr int kBytes = sizeof(typename C::Out);
      params.output =
          C::kTransposesD
              ? tensor_map_of(p.d, p.n, std::int64_t{p.m} * kBytes, p.stride_d * kBytes, C::kChunk, C::kLine)
              : tensor_map_of(p.d, token_rows, std::int64_t{p.n} * kBytes, p.stride_d * kBytes, C::kWarpRows);
    }
    return params;
  }

  // Scales of tokens stored by columns, where every column and every tile's part begins at a multiple of 16 bytes: TMA
  // faults otherwise. Experts' rows may begin anywhere. If K steps are short the producer warp has no time for them.
  static bool can_copy_scales(GroupwiseProblem const& p) {
    GroupScales const& scales = p.scale_a;
    bool const on_lines =
        reinterpret_cast<std::uintptr_t>(scales.ptr) % 16 == 0 && scales.stride_k > 0 && scales.stride_k % 4 == 0;
    bool const tiles_on_lines = p.offs == nullptr && (p.masked_m == nullptr || p.m % 4 == 0);
    return scales.stride_row == 1 && scales.shift == GroupScales::kPerRow && on_lines && tiles_on_lines;
  }

  // Scales of weights stored by rows, by TMA like those of tokens: faster with one 32-column tile per CTA; with wider
  // tiles, or more of them, copies by warps are.
  static bool may_copy_all_scales(GroupwiseProblem const& p, int sm_count) {
    GroupScales const& scales = p.scale_b;
    bool const on_lines =
        reinterpret_cast<std::uintptr_t>(scales.ptr) % 16 == 0 && scales.stride_row > 0 && scales.stride_row % 4 == 0;
    bool const in_rows = scales.stride_k == 1 && scales.shift == GroupScales::kPerBlock;
    bool const one_tile_each = p.experts == 1 && tiles(p.m, C::kM) * tiles(p.n, C::kN) <= sm_count;
    return C::kMayCopyAllScales && one_tile_each && on_lines && in_rows && can_copy_scales(p);
  }

  // K steps of the first of two CTAs that split K. If the second sends all its sums it has fewer steps, so that they
  // arrive before the first is done.
  static int steps_of_first(GroupwiseProblem const& p) {
    constexpr int kLead = C::kOneSidedSplitK ? 2 : 0;
    int const steps = static_cast<int>(tiles(p.k, kGroupDepth));
    return p.split_k == 1 ? steps : std::min((steps + 1) / 2 + kLead, steps - 1);
  }

  // Tiles whose K two CTAs may split.
  static int split_tile_count(GroupwiseProblem const& p, int sm_count) {
    if (tiles(p.k, kGroupDepth) < 2) return 0;
    return static_cast<int>(split_tiles(C::kConfig, tiles(p.m, C::kM) * tiles(p.n, C::kN), sm_count));
  }

  // Without experts, whose rows and tiles are known only on the device.
  static bool is_dense(GroupwiseProblem const& p) { return p.offs == nullptr && p.masked_m == nullptr; }
  static bool multicast(GroupwiseProblem const& p, int sm_count) {
    return C::kMulticast && is_dense(p) && sm_count > 1;
  }
  static std::int64_t tiles(std::int64_t size, int tile) { return (size + tile - 1) / tile; }

  // The problem whose D^T is the other's D.
  static GroupwiseProblem transposed(GroupwiseProblem p) {
    std::swap(p.m, p.n), std::swap(p.a, p.b), std::swap(p.stride_a, p.stride_b), std::swap(p.scale_a, p.scale_b);
    return p;
  }

  static void launch(GroupwiseProblem const& given, int device, Stream stream) {
    GroupwiseProblem const p = C::kTransposesD ? transposed(given) : given;
    auto* const kernel = groupwise_kernel<C>;
    static PerDevice prepared;
    prepared.allow_shared(kernel, C::kSharedBytes, device);
    thread_local ParamsCache<GroupwiseProblem, GroupwiseParams> cache;
    int const sm_count = device_properties(device).sm_count;
    auto const& params = cache.get(cache_key(p.a, p.b, p.d), p, device, [&] { return params_of(p, sm_count); });
    int const cluster = multicast(p, sm_count) ? 2 : p.split_k;
    std::int64_t const clusters = tiles(tiles(p.m, C::kM) * tiles(p.n, C::kN) * p.split_k, cluster);
    std::int64_t const blocks = is_dense(p) ? std::min<std::int64_t>(sm_count / cluster, clusters) * cluster : sm_count;
    if (p.split_k > 1 && !(is_dense(p) && split_tile_count(p, sm_count) > 0)) {
      throw std::logic_error("epiloq.groupwise_mm: K cannot be split here");
    }
    cuda_check(
        launch_pdl_clusters(kernel, static_cast<int>(blocks), cluster, C::kThreads, C::kSharedBytes, stream, params),
        "launching epiloq.groupwise_mm");
  }
};

}  // namespace epiloq::gemm
