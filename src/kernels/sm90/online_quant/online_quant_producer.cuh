#pragma once

// Producer threads of the online_quant_mm GEMM: one for each operand, with TMA.

#include "kernels/common/ptx/tma.cuh"
#include "kernels/common/tensor_map.h"
#include "kernels/sm90/online_quant/online_quant_tile.cuh"

namespace epiloq::gemm {

struct OnlineQuantSm90Params {
  OnlineQuantGemmProblem p;
  RowTiles weights, values;
  CUtensorMap weight_parameters;
  CUtensorMap output;  // if TMA can store
  bool stores_boxes;
  int first_steps[kMaxCluster + 1];  // first K step of each CTA of a cluster that splits K, and the number of steps
};

template <class T>
struct OnlineQuantSm90Copies {
  using Shared = typename T::Shared;
  using TileScheduler = typename T::TileScheduler;
  using TileOrigin = typename T::TileOrigin;
  using Parameters = typename T::Parameters;

  static OnlineQuantSm90Params params_of(OnlineQuantGemmProblem const& p) {
    int const weight_bytes = p.k / 8 * T::kBits;
    auto const lines = static_cast<std::uint64_t>(p.k / T::kStep) * p.kinds;
    auto const columns = static_cast<std::uint64_t>(p.padded_n);
    constexpr int kHalf = 2, kUnit = 16 / kHalf;  // TMA writes whole 16-byte units
    bool const stores_boxes = p.dtype != DType::kFloat32 && p.stride_out % kUnit == 0 && p.n % kUnit == 0 &&
                              reinterpret_cast<std::uintptr_t>(p.out) % 16 == 0;
    OnlineQuantSm90Params params{
        p,
        row_tiles_of(p.b, p.n, weight_bytes, weight_bytes, T::kRows, p.n, true, T::kRowBytes),
        row_tiles_of(p.a, p.m, p.k, p.k, T::kTokens, p.m),
        encode_tensor_map(p.b_parameters, {columns, lines}, {4 * columns}, {static_cast<std::uint32_t>(T::kRows), 1},
                          CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_DATA_TYPE_FLOAT32),
        stores_boxes ? tensor_map_of(p.out, p.m, kHalf * p.n, kHalf * p.stride_out, T::kChunk, T::kLine)
                     : CUtensorMap{},
        stores_boxes,
        {}};
    for (int rank = 0; rank <= p.split; ++rank) params.first_steps[rank] = rank * (p.k / T::kStep) / p.split;
    return params;
  }

  // The CTA's K steps of a tile, as `scheduler` has them, but from a table: divisions would delay the first copies.
  // (Consumers start later and keep the divisions.)
  struct Steps {
    int first, count;
    __device__ Steps(OnlineQuantSm90Params const& params, TileScheduler const& scheduler, int tile)
        : first(0), count(scheduler.all) {
      if (!scheduler.is_split(tile)) return;
      first = params.first_steps[blockIdx.y], count = params.first_steps[blockIdx.y + 1] - first;
    }
  };

  // The first K steps whose weights are issued before everything else.
  static __device__ int early(OnlineQuantSm90Params const& params) {
    TileScheduler const scheduler(params.p);
    return scheduler.first() < scheduler.tiles ? min(Steps(params, scheduler, scheduler.first()).count, T::kEarlySteps)
                                               : 0;
  }
  template <class Fill>
  static __device__ __forceinline__ void fill_early(OnlineQuantSm90Params const& params, Fill fill) {
    auto const& p = params.p;
    TileScheduler const scheduler(p);
    int const tile = scheduler.first();
    TileOrigin const origin(p, tile);
    Steps const steps(params, scheduler, tile);
    typename T::State at;
#pragma unroll 1
    for (int i = 0; i < early(params); ++i, at.advance()) {
      fill(at, origin, steps.first + i, Parameters(p.kinds == T::kKinds, i, steps.count));
    }
  }
  // Calls `fill` for each of the CTA's stages, in order, once it is empty; except the first `filled` ones.
  template <class Fill>
  static __device__ __forceinline__ void fill_others(Shared const& shared, OnlineQuantSm90Params const& params,
                                                     int filled, Fill fill) {
    auto const& p = params.p;
    TileScheduler const scheduler(p);
    typename T::State at{filled, 0};
    for (int tile = scheduler.first(); tile < scheduler.tiles; tile = scheduler.after(tile)) {
      TileOrigin const origin(p, tile);
      Steps const steps(params, scheduler, tile);
#pragma unroll 1
      for (int i = filled; i < steps.count; ++i) {
        mbarrier_wait(shared.empty + at.stage * 8, at.phase ^ 1);
        fill(at, origin, steps.first + i, Parameters(p.kinds == T::kKinds, i, steps.count));
        at.advance();
      }
      filled = 0;
    }
  }

  // Rows and tokens outside the tile keep old contents, which reach only their own sums. Weight parameters outside
  // count towards the transaction and read as zero.
  static __device__ __forceinline__ auto weights(Shared const& shared, OnlineQuantSm90Params const& params) {
    return [&](auto const& at, TileOrigin const& origin, int step, Parameters const& parameters) {
      SharedAddress const full = shared.full + at.stage * 8;
      bool const is_last = origin.first_n + T::kRows > params.p.n;
      mbarrier_expect_tx(full, params.weights.boxes[is_last] * T::kRowBytes + parameters.lines() * T::kRows * 4);
      tma_load(shared.weights + at.stage * T::kWeights, params.weights.maps[is_last], step * T::kRowBytes,
               origin.first_n, full);
      SharedAddress const to = shared.weight_parameters + at.stage * T::kWeightParameters;
#pragma unroll 1
      for (int line = 0; line < parameters.lines(); ++line) {
        tma_load(to + line * T::kRows * 4, params.weight_parameters, origin.first_n,
                 step * params.p.kinds + parameters.source(line, params.p.kinds, params.p.k), full);
      }
    };
  }
  static __device__ __forceinline__ auto tokens(Shared const& shared, OnlineQuantSm90Params const& params) {
    return [&](auto const& at, TileOrigin const& origin, int step, Parameters const& parameters) {
      auto const& p = params.p;
      SharedAddress const full = shared.full + at.stage * 8;
      int const part_bytes = min(T::kTokens, p.padded_m - origin.first_m) * 16;
      bool const is_last = origin.first_m + T::kTokens > p.m;
      mbarrier_expect_tx(full, params.values.boxes[is_last] * T::kStep + parameters.lines() * part_bytes);
      tma_load(shared.values + at.stage * T::kValues, params.values.maps[is_last], step * T::kStep, origin.first_m,
               full);
      SharedAddress const to = shared.parts + at.stage * T::kTokenParts;
      auto const* const from = reinterpret_cast<float4 const*>(p.a_parameters) + origin.first_m;
#pragma unroll 1
      for (int line = 0; line < parameters.lines(); ++line) {
        auto const source = static_cast<std::int64_t>(step) * T::kKinds + parameters.source(line, T::kKinds, 1);
        bulk_load(to + line * T::kPlane, from + source * p.padded_m, part_bytes, full);
      }
    };
  }
};

}  // namespace epiloq::gemm
