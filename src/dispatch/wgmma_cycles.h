#pragma once

// Cost model of WGMMA kernels that convert packed weights in registers, from counts: a K step of 128 columns takes as
// long as the slowest of products, conversions and loads; or loads and what a K group does one after the other.

#include <algorithm>
#include <cstdint>
#include <limits>

#include "core/ceil_div.h"
#include "core/target.h"
#include "kernels/common/w4a16/config.h"
#include "kernels/common/w4a16/sizes.h"
#include "problems/packed_layout.h"

namespace epiloq::ops::weight_only_mm {

inline constexpr double kCyclesPerUs = 1755;  // of an H100's clock

// Per cycle of an SM: products of the tensor cores, weights converted by the integer pipes, bytes of weights that
// memory delivers, and bytes of the sums that split-K sends. Cycles: of a K step in addition to its longest part, and
// of a tile's prologue and epilogue.
struct WgmmaRates {
  double fma, conversions;
  bool overlaps;  // products and conversions
  double weight_bytes = 14.5, sent_bytes = 12;
  double step_overhead = 80, tile = 1500;
  bool splits_in_waves = false;  // more clusters may split K than run at a time
};

// Cycles of a kernel, and what they are made of.
struct WgmmaCycles {
  std::int64_t tiles = 0, waves = 0, steps = 0;            // CTA tiles; waves of them; K steps per CTA
  double products = 0, conversions = 0, loads = 0;         // of a K step
  double step = 0, tile = 0, sent = 0;                     // a K step; prologue and epilogue; split-K's partial sums
  double total = std::numeric_limits<double>::infinity();  // if the clusters that split K cannot all run at a time
};

inline WgmmaCycles wgmma_cycles(WgmmaConfig const& c, WgmmaRates const& rates, int split, std::int64_t m,
                                std::int64_t n, std::int64_t k, Target const& t) {
  WgmmaCycles cycles;
  cycles.tiles = ceil_div(n, c.rows()) * ceil_div(m, c.tokens);
  std::int64_t const at_a_time = clusters_at_once(split, 1, t);
  if (split > 1 && cycles.tiles > at_a_time && !rates.splits_in_waves) return cycles;
  double const weights = static_cast<double>(c.rows()) * kPadding;
  cycles.products = weights * c.tokens / rates.fma;
  cycles.conversions = weights / rates.conversions;
  cycles.loads = weights / 2 / rates.weight_bytes;
  double const work = rates.overlaps ? std::max(cycles.products, cycles.conversions)
                                     : cycles.products + cycles.conversions / c.k_groups;
  cycles.step = rates.step_overhead + std::max(work, cycles.loads);
  cycles.steps = ceil_div(ceil_div(k, kPadding), split);
  cycles.waves = ceil_div(cycles.tiles, at_a_time);
  cycles.tile = rates.tile;
  cycles.sent = 4.0 * c.rows() * c.tokens * (split - 1) / split / rates.sent_bytes;
  cycles.total =
      static_cast<double>(cycles.waves) * (static_cast<double>(cycles.steps) * cycles.step + cycles.tile + cycles.sent);
  return cycles;
}

}  // namespace epiloq::ops::weight_only_mm
