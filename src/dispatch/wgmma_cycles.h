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
inline constexpr double kStepOverhead = 80;  // cycles per K step in addition to its longest part; assumed, not measured

// Per cycle of an SM: products of the tensor cores, weights converted by the integer pipes, bytes of weights that
// memory delivers.
struct WgmmaRates {
  double fma, conversions;
  bool overlaps;  // products and conversions
  double weight_bytes = 14.5;
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
  // Assumed, not measured: cycles per tile for prologue and epilogue; bytes per cycle of the sums that split-K sends.
  constexpr double kTile = 1500, kSentBytes = 12;
  WgmmaCycles cycles;
  cycles.tiles = ceil_div(n, c.rows()) * ceil_div(m, c.tokens);
  if (split > 1 && cycles.tiles > clusters(split, 1, t)) return cycles;
  double const weights = static_cast<double>(c.rows()) * kPadding;
  cycles.products = weights * c.tokens / rates.fma;
  cycles.conversions = weights / rates.conversions;
  cycles.loads = weights / 2 / rates.weight_bytes;
  double const work = rates.overlaps ? std::max(cycles.products, cycles.conversions)
                                     : cycles.products + cycles.conversions / c.k_groups;
  cycles.step = kStepOverhead + std::max(work, cycles.loads);
  cycles.steps = ceil_div(ceil_div(k, kPadding), split);
  cycles.waves = split > 1 ? 1 : ceil_div(cycles.tiles, t.sm_count);
  cycles.tile = kTile;
  cycles.sent = 4.0 * c.rows() * c.tokens * (split - 1) / split / kSentBytes;
  cycles.total =
      static_cast<double>(cycles.waves) * (static_cast<double>(cycles.steps) * cycles.step + kTile) + cycles.sent;
  return cycles;
}

}  // namespace epiloq::ops::weight_only_mm
