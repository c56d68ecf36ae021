#include "dispatch/w4a8_mm/select.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/ceil_div.h"
#include "kernels/launch/w4a8_mm.h"
#include "problems/packed_layout.h"

namespace epiloq::ops::w4a8_mm {
namespace {

// Cycles of an SM90 SM per K step of 128 columns, from counts, not fitted: the tensor cores' rate; about 1.4
// instructions of the integer pipes per weight; what memory delivers of 4-bit weights, per SM.
constexpr double kCyclesPerUs = 1755;  // of an H100's clock
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

std::vector<tuning::Timed<Choice>> Selection::candidates(W4a8Problem const& p, Target const& t) {
  std::vector<tuning::Timed<Choice>> all;
  if (!t.has_wgmma || p.k == 0) return all;
  for (int row = 0; row < static_cast<int>(kRows.size()); ++row) {
    for (int split = 1; split <= kMaxCluster; split *= 2) {
      double const time = cycles(kRows[row], split, p.m, p.n, p.k, t);
      if (std::isfinite(time)) all.push_back({{row, split}, time / kCyclesPerUs});
    }
  }
  return all;
}

Choice choose(W4a8Problem const& p, Target const& t) {
  tuning::Timed<Choice> best{{0}, std::numeric_limits<double>::infinity()};
  for (auto const& candidate : Selection::candidates(p, t)) {
    if (candidate.us < best.us) best = candidate;
  }
  return best.choice;
}

std::string describe(Choice const& choice) {
  auto const& c = kRows[choice.row];
  std::string const split = choice.split > 1 ? ", K over clusters of " + std::to_string(choice.split) : "";
  return "sm90 wgmma, weights to float8 in registers, " + std::to_string(c.rows()) + " weight rows x " +
         std::to_string(c.tokens) + " tokens" + split;
}

}  // namespace epiloq::ops::w4a8_mm
