#pragma once

// float8 GEMM for SM90 with scales every 128 of K, and int8 and float8 GEMM with scales of whole rows, of experts too,
// written on wgmma and TMA rather than CUTLASS's collective, which has no epilogue of ours, no tiles narrower than 128
// weights and no experts.
//
// Tokens are the rows of wgmma's tile, whatever their number: a box of the tokens there are is all that TMA reads, so a
// tile of few tokens costs their bytes and no more, and its width in weights is free to fill the SMs evenly. Each 128
// of K is multiplied into fresh accumulators and added to the sums in fp32 with its scales. Warpgroups stand side by
// side along M, or take turns along K where there is little to multiply and latency is what counts. Where tiles, or
// those of a last wave, are too few for all SMs, two blocks share K.

#include <cutlass/arch/reg_reconfig.h>

#include <algorithm>
#include <stdexcept>

#include "epiloq/device.h"
#include "kernels/common/params_cache.h"
#include "kernels/common/ptx/cta.cuh"
#include "kernels/sm90/groupwise_mainloop.cuh"
#include "kernels/sm90/groupwise_scale_producer.cuh"
#include "kernels/sm90/groupwise_store.cuh"

namespace epiloq::gemm {

template <class C>
__device__ void multiply_tiles(GroupwiseParams const& params, typename C::Shared const& shared, int group, int warp,
                               int lane) {
  using Mainloop = GroupwiseMainloop<C>;
  int const group_m = C::kKGroups > 1 ? 0 : group, group_k = C::kKGroups > 1 ? group : 0;
  KRange<C> const share(params);
  typename Mainloop::Place place(params, shared, group_m, group_k, warp, lane, share.first_of_all());
  int const first_row = group_m * 64 + warp * 16 + group_k * C::kWarpRows;
  GroupwiseStore<C> out(params, shared, group * 4 + warp, first_row, lane);
  int before = 0;  // steps of the tiles that are done
  auto const finish = [&](auto& sums, GroupwiseTile const& tile, int depth, bool is_last) {
    typename GroupwiseStore<C>::Exchange exchange{};
    if constexpr (C::kMaySplitK) {
      if (share.is_split(tile)) {
        bool const has_rows = warp_uniform(tile.first_row + first_row < tile.end_row);
        if constexpr (C::kSplitsLastWave) {
          exchange = {params, shared, group * 4 + warp, lane, has_rows};
        } else {
          RowExchange<C> const rows(shared, group * 4 + warp, lane, warp_uniform(KRange<C>::rank_in(params)));
          if (!rows.meet(sums[0], has_rows)) return;
        }
      }
    }
    out.store(sums, tile, is_last || depth <= C::kParts, exchange);
  };
  // Which tile comes next takes some 200 cycles to find out, in which nobody would multiply: where tiles leave during
  // the next one's products, that is done beside this one's last.
  GroupwiseScheduler<C> scheduler(params.p, params.tiles);
  GroupwiseTile tile, following{};
  for (bool more = scheduler.next(tile); warp_uniform(more); tile = following) {
    int const depth = share.depth(tile), steps = (depth - group_k + C::kKGroups - 1) / C::kKGroups;
    typename C::Sum sums[C::kRounds][Mainloop::kSums] = {};
    int const boundary = in_register(kGroupDepth - tile.first_column % kGroupDepth);
    if constexpr (C::kPairs) place.tell(warp_uniform(tile.is_alone));
    out.expect(tile);
    auto const send = [&] { out.send_one(); };
    auto const look_ahead = [&] { more = scheduler.next(following); };
    auto const fill = [&] {
      if constexpr (C::kFillsEarly) out.fill_first_round(sums, tile);
    };
    Mainloop::sum(sums, place, PipelineState<C>(before + group_k), steps, boundary, send, look_ahead, fill);
    out.await_operands();
    if constexpr (C::kKGroups == 1) {
      finish(sums, tile, depth, C::kSendsLater && !more);
    } else {
      typename C::Sum of_rows[1][C::kRowSums] = {};
      Mainloop::meet(of_rows[0], sums[0], reinterpret_cast<typename C::Sum*>(shared.partial()), group_k,
                     warp_uniform(before > 0));
      finish(of_rows, tile, depth, false);
    }
    before += depth;
    if constexpr (!C::kSendsLater) look_ahead();
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
    // By the one thread that made them all: this fence by a thread for each stage took 0.7 us.
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  bool const in_cluster = (C::kPairs && params.tiles.in_pairs) || (C::kMaySplitK && params.p.split_k > 1);
  if (in_cluster) cluster_arrive();
  TileProducer<C> const producer(params, shared);
  int early = 0;  // steps that have their weights
  if (C::kFew && params.p.constant_b) {
    if (group == C::kConsumerGroups && warp < C::kProducerWarps) early = producer.issue_early(warp);
  } else if (group == C::kConsumerGroups && warp == 0 && elect_one()) {
    producer.prefetch();
  }
  pdl_trigger();
  if (in_cluster) {
    __syncwarp();
    cluster_wait();
  }
  pdl_wait();
  if (group == C::kConsumerGroups) {
    if constexpr (C::kMovesRegisters) cutlass::arch::warpgroup_reg_dealloc<C::kProducerRegisters>();
    if constexpr (C::kApart) {
      producer.run_apart(warp >= C::kProducerWarps, warp % C::kProducerWarps, early);
    } else {
      if (warp < C::kProducerWarps) producer.run(warp, early);
    }
    // Each reader's scales, unless it brings them itself, by kScaleWarps.
    int const turn = warp - C::kProducerWarps, part = turn / C::kProducerWarps;
    if (C::kMayCopyAllScales && params.copies_all_scales) {
      if (turn >= 0) copy_all_scales<C>(producer, turn);
    } else if (!C::kWholeRows && !C::brings_scales(params) && turn >= 0 && part < C::kScaleWarps) {
      read_scales<C>(params, shared, producer.share, turn % C::kProducerWarps, part * 32 + lane);
    }
  } else {
    if constexpr (C::kMovesRegisters) cutlass::arch::warpgroup_reg_alloc<C::kConsumerRegisters>();
    multiply_tiles<C>(params, shared, group, warp, lane);
  }
}

template <class C>
struct GroupwiseGemm {
  static GroupwiseParams params_of(GroupwiseProblem const& p, int sm_count) {
    bool const is_dense = p.offs == nullptr && p.masked_m == nullptr;
    std::int64_t const token_rows = p.masked_m != nullptr ? std::int64_t{p.experts} * p.m : p.m;
    GroupwiseParams params{
        row_tiles_of(p.a, token_rows, p.k, p.stride_a, C::kM, p.m, is_dense),
        row_tiles_of(p.b, std::int64_t{p.experts} * p.n, p.k, p.stride_b, C::kN, p.n),
        {},
        {},
        {},
        {},
        p,
        GroupwiseScheduler<C>::tiles_of(p, p.split_k == 1 ? 0 : shared(p, sm_count), in_pairs(p, sm_count)),
        C::kMayBringScales && can_copy_scales(p),
        may_copy_all_scales(p, sm_count),
        GroupwiseStore<C>::can_store_boxes(p),
        steps_of_first(p)};
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
    if (params.tiles.in_pairs) params.half = tensor_map_of(p.a, token_rows, p.k, p.stride_a, C::kM / 2);
    if (params.stores_boxes) {
      constexpr int kBytes = sizeof(typename C::Out);
      params.output = tensor_map_of(p.d, token_rows, std::int64_t{p.n} * kBytes, p.stride_d * kBytes, C::kWarpRows);
    }
    return params;
  }

  // Scales of tokens in columns, of which every column and every tile's part begins at a multiple of 16 bytes: TMA
  // stops the kernel with an illegal instruction where a box does not. Experts' rows may begin anywhere. Where steps
  // are short the warp that asks for them has no time for more.
  static bool can_copy_scales(GroupwiseProblem const& p) {
    GroupScales const& scales = p.scale_a;
    bool const on_lines =
        reinterpret_cast<std::uintptr_t>(scales.ptr) % 16 == 0 && scales.stride_k > 0 && scales.stride_k % 4 == 0;
    bool const tiles_on_lines = p.offs == nullptr && (p.masked_m == nullptr || p.m % 4 == 0);
    return scales.stride_row == 1 && scales.shift == 0 && on_lines && tiles_on_lines;
  }

  // Scales of weights in rows, beside those of tokens. Warps' copies cost 2 us of 8 to 19 where a block has one tile of
  // 32 weights, whatever K; with wider tiles, or more, it is TMA's that cost, 1 to 6 % (all-scales.json).
  static bool may_copy_all_scales(GroupwiseProblem const& p, int sm_count) {
    GroupScales const& scales = p.scale_b;
    bool const on_lines =
        reinterpret_cast<std::uintptr_t>(scales.ptr) % 16 == 0 && scales.stride_row > 0 && scales.stride_row % 4 == 0;
    bool const in_rows = scales.stride_k == 1 && scales.shift == 7;
    bool const one_tile_each = p.experts == 1 && tiles(p.m, C::kM) * tiles(p.n, C::kN) <= sm_count;
    return C::kMayCopyAllScales && one_tile_each && on_lines && in_rows && can_copy_scales(p);
  }

  // Of K, to the first of two blocks that share it. One that gives all of its sums has less, so that they are there
  // when the first is done; two steps brought as much as six (given-sums.json).
  static int steps_of_first(GroupwiseProblem const& p) {
    constexpr int kLead = C::kGivesAll ? 2 : 0;
    int const steps = static_cast<int>(tiles(p.k, kGroupDepth));
    return p.split_k == 1 ? steps : std::min((steps + 1) / 2 + kLead, steps - 1);
  }

  // Tiles whose K two blocks may share.
  static int shared(GroupwiseProblem const& p, int sm_count) {
    if (tiles(p.k, kGroupDepth) < 2) return 0;
    return static_cast<int>(split_tiles(C::kConfig, tiles(p.m, C::kM) * tiles(p.n, C::kN), sm_count));
  }

  // Not of experts, whose rows and tiles only the device knows.
  static bool in_pairs(GroupwiseProblem const& p, int sm_count) {
    return C::kPairs && p.offs == nullptr && p.masked_m == nullptr && sm_count > 1;
  }
  static std::int64_t tiles(std::int64_t size, int tile) { return (size + tile - 1) / tile; }

  static void launch(GroupwiseProblem const& p, int device, Stream stream) {
    auto* const kernel = groupwise_kernel<C>;
    static PerDevice prepared;
    prepared.once(device, [kernel] {
      cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes),
                 "asking for shared memory");
    });
    thread_local ParamsCache<GroupwiseProblem, GroupwiseParams> cache;
    int const sm_count = device_properties(device).sm_count;
    auto const& params = cache.get(cache_key(p.a, p.b, p.d), p, device, [&] { return params_of(p, sm_count); });
    bool const is_dense = p.offs == nullptr && p.masked_m == nullptr;
    int const cluster = in_pairs(p, sm_count) ? 2 : p.split_k;
    std::int64_t const clusters = tiles(tiles(p.m, C::kM) * tiles(p.n, C::kN) * p.split_k, cluster);
    std::int64_t const blocks = is_dense ? std::min<std::int64_t>(sm_count / cluster, clusters) * cluster : sm_count;
    if (p.split_k > 1 && !(is_dense && shared(p, sm_count) > 0)) {
      throw std::logic_error("epiloq.groupwise_mm: K cannot be shared here");
    }
    cuda_check(
        launch_pdl_clusters(kernel, static_cast<int>(blocks), cluster, C::kThreads, C::kSharedBytes, stream, params),
        "launching epiloq.groupwise_mm");
  }
};

}  // namespace epiloq::gemm
