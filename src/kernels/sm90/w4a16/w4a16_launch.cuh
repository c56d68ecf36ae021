#pragma once

// Host side of the TMA-fed weight-only kernels: descriptors, parameters, launch.

#include <algorithm>

#include "core/cuda_check.h"
#include "epiloq/device.h"
#include "kernels/common/occupancy.h"
#include "kernels/common/params_cache.h"
#include "kernels/common/tensor_map.h"
#include "kernels/common/w4a16/sizes.h"
#include "kernels/launch/weight_only_mm.h"
#include "kernels/sm90/w4a16/w4a16_producer.cuh"

namespace epiloq::ops::weight_only_mm {

// Everything that the weight maps depend on.
struct WeightReads {
  std::uint8_t const* q;
  void const* scale;
  std::uint8_t const* zero;
  int n, padded_k, bits, groups, scale_bytes;
  int rows, step_groups;

  static WeightReads of(Weight const& w, int rows, int step_groups) {
    return {w.q, w.scale, w.zero, w.n, w.padded_k, w.bits, w.groups, size_of(w.scale_dtype), rows, step_groups};
  }
  bool operator==(WeightReads const&) const = default;
};

// Token boxes: of a whole tile and of the last, multiples of eight tokens (the swizzle's period).
struct TokenBoxes {
  int whole, last;

  static TokenBoxes of(int tokens, int tile) {
    auto const box = [](int count) { return (count + kEight - 1) / kEight * kEight; };
    int const rest = tokens % tile;
    return {std::min(tile, box(tokens)), rest == 0 ? tile : box(rest)};
  }
  bool operator==(TokenBoxes const&) const = default;

  static constexpr int kEight = 8;
};

// Everything that the maps depend on if tokens are rows of a matrix.
struct MatrixReads {
  WeightReads weight;
  void const* x;
  std::int64_t stride_x;
  int k, m, token_bytes;
  TokenBoxes boxes;

  template <class C>
  static MatrixReads of(Problem const& p) {
    // The stride of a single row does not matter, and may be anything.
    std::int64_t const stride_x = p.m > 1 ? p.stride_x : (p.weight.k + 7) / 8 * 8;
    return {WeightReads::of(p.weight, C::kRows, C::kGroups),
            p.x,
            stride_x,
            p.weight.k,
            p.m,
            C::Tokens::kBytes,
            TokenBoxes::of(p.m, C::kTokens)};
  }
  CUtensorMap token_map(int box) const {
    return gemm::tensor_map_of(x, m, std::int64_t{k} * token_bytes, stride_x * token_bytes, box);
  }
  bool operator==(MatrixReads const&) const = default;
};

template <class Reads>
TileMaps maps_of(Reads const& reads) {
  using gemm::encode_tensor_map;
  WeightReads const& r = reads.weight;
  auto const u64 = [](std::int64_t value) { return static_cast<std::uint64_t>(value); };
  auto const u32 = [](int value) { return static_cast<std::uint32_t>(value); };
  std::uint64_t const panels = u64((r.n + kPanelRows - 1) / kPanelRows),
                      of_panel = u64(r.padded_k / kPadding) * panel_bytes(r.bits);
  std::uint32_t const box_panels = u32(r.rows / kPanelRows);
  auto const parameters = [&](void const* values, int bytes) {  // per K step, by panel
    std::uint64_t const all = u64(r.groups) * kPanelRows * bytes;
    return encode_tensor_map(values, {all, panels}, {all}, {u32(r.step_groups * kPanelRows * bytes), box_panels},
                             CU_TENSOR_MAP_SWIZZLE_NONE);
  };
  TileMaps maps{};
  maps.weights = encode_tensor_map(r.q, {of_panel / kMapWord, panels}, {of_panel},
                                   {u32(panel_bytes(r.bits) / kMapWord), box_panels}, CU_TENSOR_MAP_SWIZZLE_NONE,
                                   CU_TENSOR_MAP_DATA_TYPE_UINT64);
  maps.tokens[0] = reads.token_map(reads.boxes.whole);
  maps.tokens[1] = reads.token_map(reads.boxes.last);
  maps.scales = parameters(r.scale, r.scale_bytes);
  if (r.zero != nullptr) maps.zeros = parameters(r.zero, 1);
  return maps;
}

// Cached, as a model calls with the same tensors again.
template <class Reads>
TileMaps const& cached_maps(Reads const& reads, int device) {
  thread_local gemm::ParamsCache<Reads, TileMaps> cache;
  return cache.get(gemm::cache_key(reads.x, reads.weight.q, reads.weight.scale), reads, device,
                   [&] { return maps_of(reads); });
}

template <class C, class Config>
TileParams params_of(Config const& config, Problem const& p, int split, TileMaps const& maps, int device) {
  Weight const& w = p.weight;
  int const scale_bytes = size_of(w.scale_dtype), zero_bytes = w.zero != nullptr ? 1 : 0;
  constexpr int kTokenBytes = C::Tokens::kBytes;
  TileStage const stage(config, C::kBits, C::kGroups, scale_bytes, zero_bytes, kTokenBytes);
  TokenBoxes const boxes = TokenBoxes::of(p.m, C::kTokens);
  int const shared_bytes = device_properties(device).shared_memory_per_block;
  int const steps = w.padded_k / kPadding, token_tiles = static_cast<int>(ceil_div(p.m, C::kTokens)),
            row_tiles = static_cast<int>(ceil_div(w.n, C::kRows));
  int const stages = stage_count(config, stage, shared_bytes);
  return {.maps = maps,
          .steps = steps / split,
          .longer = steps % split,
          .token_tiles = token_tiles,
          .row_tiles = row_tiles,
          .tokens = p.m,
          .early = std::min(stages, C::kEarly),
          .stages = stages,
          .group_shift = w.group_shift,
          .scale_bytes = scale_bytes,
          .zero_bytes = zero_bytes,
          .stage = stage,
          .loaded_bytes = {stage.loaded_bytes(C::kTokens - boxes.whole, kTokenBytes),
                           stage.loaded_bytes(C::kTokens - boxes.last, kTokenBytes)},
          .p = p,
          .tiles = token_tiles * row_tiles,
          .exchange_at = exchange_at(config, stage, shared_bytes)};
}

// One tile per CTA with split-K; otherwise CTAs loop over tiles if the kernel supports it.
template <class C, class Config>
void launch_tiles(void (*kernel)(typename C::Params), Config const& config, typename C::Params const& params, int split,
                  int device, Stream stream, char const* launching) {
  static PerDevice prepared;
  int const shared_bytes = device_properties(device).shared_memory_per_block;
  prepared.allow_shared(kernel, shared_bytes - barrier_bytes(C::kMostStages), device);
  int const sm_count = device_properties(device).sm_count, share = blocks_of_sm(config, params.tiles, split, sm_count);
  int const bytes =
      std::max(pipeline_shared_bytes(config, params.stage, shared_bytes), smem_for_ctas_per_sm(share, shared_bytes));
  int const blocks = split > 1 || !C::kIsPersistent ? params.tiles : std::min(params.tiles, share * sm_count);
  cuda_check(launch_pdl_clusters(kernel, dim3(blocks, split), dim3(1, split), C::kThreads, bytes, stream, params),
             launching);
}

// Tokens are the rows of a matrix.
template <class C, class Config>
void launch_matrix_tiles(void (*kernel)(TileParams), Config const& config, Problem const& p, int split, int device,
                         Stream stream) {
  auto const& maps = cached_maps(MatrixReads::of<C>(p), device);
  launch_tiles<C>(kernel, config, params_of<C>(config, p, split, maps, device), split, device, stream,
                  "launching epiloq.weight_only_mm");
}

}  // namespace epiloq::ops::weight_only_mm
