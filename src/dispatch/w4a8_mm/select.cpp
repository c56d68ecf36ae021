#include "dispatch/w4a8_mm/select.h"

#include <cmath>
#include <limits>

#include "dispatch/wgmma_cycles.h"
#include "kernels/launch/w4a8_mm.h"

namespace epiloq::ops::w4a8_mm {
namespace {

// About 1.4 instructions of the integer pipes per weight.
constexpr weight_only_mm::WgmmaRates kRates{.fma = 4096, .conversions = 64 / 1.4, .overlaps = true};

}  // namespace

std::vector<tuning::Timed<Choice>> Selection::candidates(W4a8Problem const& p, Target const& t) {
  std::vector<tuning::Timed<Choice>> all;
  if (!t.has_wgmma || p.k == 0) return all;
  for (int row = 0; row < static_cast<int>(kRows.size()); ++row) {
    for (int split = 1; split <= kMaxCluster; split *= 2) {
      double const time = weight_only_mm::wgmma_cycles(kRows[row], kRates, split, p.m, p.n, p.k, t);
      if (std::isfinite(time)) all.push_back({{row, split}, time / weight_only_mm::kCyclesPerUs});
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
