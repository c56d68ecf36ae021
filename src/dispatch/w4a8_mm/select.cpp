#include "dispatch/w4a8_mm/select.h"

#include <cmath>
#include <limits>
#include <sstream>

#include "dispatch/wgmma_cycles.h"
#include "kernels/launch/w4a8_mm.h"

namespace epiloq::ops::w4a8_mm {
namespace {

// About 1.4 instructions of the integer pipes per weight. Fitted to an H200: products and conversions together take as
// long as products alone at about half of the tensor cores' rate.
constexpr weight_only_mm::WgmmaRates kRates{.fma = 2200,
                                            .conversions = 64 / 1.4,
                                            .overlaps = true,
                                            .sent_bytes = 22,
                                            .step_overhead = 110,
                                            .tile = 5200,
                                            .splits_in_waves = true};

weight_only_mm::WgmmaCycles cycles_of(Choice const& choice, W4a8Problem const& p, Target const& t) {
  return weight_only_mm::wgmma_cycles(kRows[choice.row], kRates, choice.split, p.m, p.n, p.k, t);
}

}  // namespace

std::vector<tuning::Timed<Choice>> Selection::candidates(W4a8Problem const& p, Target const& t) {
  std::vector<tuning::Timed<Choice>> all;
  if (!t.has_wgmma || p.k == 0) return all;
  for (int row = 0; row < static_cast<int>(kRows.size()); ++row) {
    for (int split = 1; split <= kMaxCluster; split *= 2) {
      double const time = cycles_of({row, split}, p, t).total;
      if (std::isfinite(time)) all.push_back({{row, split}, time / weight_only_mm::kCyclesPerUs});
    }
  }
  return all;
}

Choice Selection::choose(W4a8Problem const& p, Target const& t) {
  tuning::Timed<Choice> best{{0}, std::numeric_limits<double>::infinity()};
  for (auto const& candidate : candidates(p, t)) {
    if (candidate.us < best.us) best = candidate;
  }
  return best.choice;
}

std::string Selection::terms(Choice const& choice, W4a8Problem const& p, Target const& t) {
  using tuning::fixed;
  weight_only_mm::WgmmaCycles const c = cycles_of(choice, p, t);
  std::ostringstream text;
  text << "  expected " << fixed(c.total / weight_only_mm::kCyclesPerUs) << " us, " << fixed(c.total, 0)
       << " cycles: " << c.tiles << " CTA tiles on " << t.sm_count << " SMs\n"
       << "  " << c.waves << (c.waves == 1 ? " wave, " : " waves, each ") << c.steps << " K steps of "
       << fixed(c.step, 0) << " cycles + prologue and epilogue " << fixed(c.tile, 0) << '\n'
       << "  a K step: the longest of products " << fixed(c.products, 0) << ", conversions " << fixed(c.conversions, 0)
       << " and loads " << fixed(c.loads, 0) << " cycles, + " << fixed(kRates.step_overhead, 0) << '\n';
  if (choice.split > 1) text << "  partial sums to other CTAs " << fixed(c.sent, 0) << " cycles\n";
  return text.str();
}

std::string describe(Choice const& choice) {
  auto const& c = kRows[choice.row];
  std::string const split = choice.split > 1 ? ", K over clusters of " + std::to_string(choice.split) : "";
  return "sm90 wgmma, weights to float8 in registers, " + std::to_string(c.rows()) + " weight rows x " +
         std::to_string(c.tokens) + " tokens" + split;
}

}  // namespace epiloq::ops::w4a8_mm
