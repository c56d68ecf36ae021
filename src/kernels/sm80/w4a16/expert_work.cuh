#pragma once

// What a CTA of grouped_packed_mm's mma.sync kernels multiplies: a tile of an expert's tokens, which it finds by the
// experts' counts.

#include "kernels/common/device_code.cuh"
#include "kernels/common/ptx/fetch.cuh"
#include "kernels/common/w4a16/config.h"
#include "kernels/launch/grouped_packed_mm.h"
#include "problems/grouped_packed.h"

namespace epiloq::ops::grouped_packed_mm {

namespace wo = weight_only_mm;

// Tokens of an expert: rows [begin, end) of x; the CTA's tile starts at `first`. No tile if first >= end.
struct Tile {
  int expert, begin, end, first;
};

template <int kTokens>
__device__ __forceinline__ int tiles_of(int tokens) {
  return (max(tokens, 0) + kTokens - 1) / kTokens;
}

// Loads the counts of up to 256 experts into L1: a warp then scans them at less than one latency of L2 for each 32.
__device__ __forceinline__ void fetch_counts(Problem const& p) {
  constexpr int kSector = 32 / sizeof(*p.counts);
  int const expert = static_cast<int>(threadIdx.x) % 32 * kSector;
  if (expert < p.experts) fetch_sector(p.counts + expert);
}

// Each warp scans the experts' counts, 32 at a time, and finds the tile. Counts are clamped to x's rows.
template <int kTokens>
__device__ __forceinline__ Tile find_tile(Problem const& p, int tile) {
  int const lane = threadIdx.x % 32;
  int before = 0;  // tiles of earlier experts
  if (p.experts > 32) fetch_counts(p);
#pragma unroll 1
  for (int first_expert = 0; first_expert < p.experts; first_expert += 32) {
    int const expert = first_expert + lane;
    auto const count_of = [&](int i) { return min(max(p.counts[i], 0), p.product.m); };
    bool const exists = expert < p.experts;
    int const begin = exists && expert > 0 && !p.masked ? count_of(expert - 1) : 0;
    int const end = exists ? count_of(expert) : begin;
    int const own = tiles_of<kTokens>(end - begin);
    int up_to = own;  // inclusive prefix sum
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
      int const other = __shfl_up_sync(~0u, up_to, apart);
      if (lane >= apart) up_to += other;
    }
    unsigned const later = __ballot_sync(~0u, before + up_to > tile);
    if (later != 0) {
      int const found = __ffs(static_cast<int>(later)) - 1;
      int const skipped = before + __shfl_sync(~0u, up_to - own, found);
      int const of_begin = __shfl_sync(~0u, begin, found), of_end = __shfl_sync(~0u, end, found);
      return {first_expert + found, of_begin, of_end, (tile - skipped) * kTokens};
    }
    before += __shfl_sync(~0u, up_to, 31);
  }
  return {0, 0, 0, 0};
}

// The product of one expert.
template <class T>
__device__ __forceinline__ wo::Problem product_of(Problem const& p, Tile const& tile, int scale_bytes) {
  wo::Problem product = p.product;
  wo::Weight& w = product.weight;
  std::int64_t const expert = tile.expert, panels = (w.n + wo::kPanelRows - 1) / wo::kPanelRows;
  std::int64_t const parameters = expert * panels * w.groups * wo::kPanelRows;
  w.q += expert * panels * wo::kPanelRows * w.padded_k * w.bits / 8;
  w.scale = static_cast<std::uint8_t const*>(w.scale) + parameters * scale_bytes;
  if (w.zero != nullptr) w.zero += parameters;
  std::int64_t const x = p.masked ? expert * p.stride_x_expert : tile.begin * product.stride_x;
  std::int64_t const out = p.masked ? expert * p.stride_out_expert : tile.begin * product.stride_out;
  product.m = tile.end - tile.begin;
  product.x = static_cast<T const*>(product.x) + x;
  product.out = static_cast<T*>(product.out) + out;
  if (product.bias != nullptr) product.bias = static_cast<T const*>(product.bias) + expert * w.n;
  return product;
}

// What a CTA multiplies; in shared memory before the stages, as registers are for sums.
struct ExpertWork {
  wo::Problem product;
  Tile tile;
};
static_assert(wo::whole_lines(sizeof(ExpertWork)) == kExpertWorkBytes);

}  // namespace epiloq::ops::grouped_packed_mm
