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
// memory delivers.
struct WgmmaRates {
  double fma, conversions;
  bool overlaps;  // products and conversions
  double weight_bytes = 14.5;
};

// Infinite if the clusters that split K cannot all run at a time.
inline double wgmma_cycles(WgmmaConfig const& c, WgmmaRates const& rates, int split, std::int64_t m, std::int64_t n,
                           std::int64_t k, Target const& t) {
  // Assumed, not measured: cycles per tile for prologue and epilogue; bytes per cycle of the sums that split-K sends;
  // cycles per K step beside the longest of the above.
  constexpr double kTile = 1500, kSentBytes = 12, kStep = 80;
  std::int64_t const tiles = ceil_div(n, c.rows()) * ceil_div(m, c.tokens);
  if (split > 1 && tiles > clusters(split, 1, t)) return std::numeric_limits<double>::infinity();
  double const weights = static_cast<double>(c.rows()) * kPadding;
  double const products = weights * c.tokens / rates.fma, conversions = weights / rates.conversions;
  double const work = rates.overlaps ? std::max(products, conversions) : products + conversions / c.k_groups;
  double const step = kStep + std::max(work, weights / 2 / rates.weight_bytes);
  auto const steps = static_cast<double>(ceil_div(ceil_div(k, kPadding), split));
  auto const waves = static_cast<double>(split > 1 ? 1 : ceil_div(tiles, t.sm_count));
  double const sent = 4.0 * c.rows() * c.tokens * (split - 1) / split;
  return waves * (steps * step + kTile) + sent / kSentBytes;
}

}  // namespace epiloq::ops::weight_only_mm
