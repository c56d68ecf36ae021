#include "dispatch/w4a8_mm/select.h"

#include <algorithm>
#include <limits>

#include "core/ceil_div.h"
#include "kernels/launch/w4a8_mm.h"
#include "problems/packed_layout.h"

namespace epiloq::ops::w4a8_mm {
namespace {

// Cycles of an SM90 SM per K step of 128 columns, from counts, not fitted: the tensor cores' rate; about 1.4
// instructions of the integer pipes per weight; what memory delivers of 4-bit weights, per SM.
constexpr double kFma = 4096, kConversions = 64 / 1.4, kWeightBytes = 14.5;
// Assumed, not measured: cycles per tile for prologue and epilogue; bytes per cycle of the sums that split-K sends;
// cycles per K step beside the longest of the above.
constexpr double kTile = 1500, kSentBytes = 12, kStep = 80;

double cycles(weight_only_mm::WgmmaConfig const& c, int split, std::int64_t m, std::int64_t n, std::int64_t k,
              Target const& t) {
  std::int64_t const tiles = ceil_div(n, c.rows()) * ceil_div(m, c.tokens);
  if (split > 1 && tiles * split > t.sm_count) return std::numeric_limits<double>::infinity();
  double const weights = static_cast<double>(c.rows()) * weight_only_mm::kPadding;
  double const step = kStep + std::max({weights * c.tokens / kFma, weights / kConversions, weights / 2 / kWeightBytes});
  auto const steps = static_cast<double>(ceil_div(ceil_div(k, weight_only_mm::kPadding), split));
  auto const waves = static_cast<double>(split > 1 ? 1 : ceil_div(tiles, t.sm_count));
  double const sent = 4.0 * c.rows() * c.tokens * (split - 1) / split;
  return waves * (steps * step + kTile) + sent / kSentBytes;
}

}  // namespace

Choice choose(std::int64_t m, std::int64_t n, std::int64_t k, Target const& target) {
  Choice best{0};
  double least = std::numeric_limits<double>::infinity();
  for (int row = 0; row < static_cast<int>(kRows.size()); ++row) {
    for (int split = 1; split <= kMaxCluster; split *= 2) {
      double const time = cycles(kRows[row], split, m, n, k, target);
      if (time < least) best = {row, split}, least = time;
    }
  }
  return best;
}

}  // namespace epiloq::ops::w4a8_mm
