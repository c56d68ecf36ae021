#include <algorithm>
#include <cstdio>
#include <sstream>
#include <vector>

#include "dispatch/weight_only_mm/cost/measured.h"
#include "dispatch/weight_only_mm/cost/model.h"
#include "dispatch/weight_only_mm/select.h"

namespace epiloq::ops::weight_only_mm {
namespace {

std::string fixed(double value, int digits = 1) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

// A candidate's terms, a line each (cost/model.h).
void add_terms(std::ostringstream& text, char const* label, Choice const& choice, WeightOnlyMmProblem const& p,
               Target const& t) {
  text << label << ": " << describe(choice) << '\n';
  if (choice.family == Family::kTiled) {
    text << "  no cost model: the narrowest tile that holds all tokens\n";
    return;
  }
  if (choice.family == Family::kDense) {
    text << "  expected " << fixed(time_of_dense(p)) << " us\n";
    return;
  }
  Cost const c = cost_of(choice, p, t);
  text << "  expected " << fixed(c.us) << " us: start " << fixed(c.start) << " + first load " << fixed(c.first_load)
       << " + the longer of memory and SMs\n"
       << "  memory " << fixed(c.memory) << " us: " << fixed(static_cast<double>(c.bytes) * 1e-6)
       << " MB of weights at " << fixed(kSm90Costs.hardware.memory_efficiency * t.memory_gb_s, 0) << " GB/s\n"
       << "  SMs " << fixed(c.sms) << " us: " << c.ctas << " CTAs in " << c.waves << (c.waves == 1 ? " wave" : " waves")
       << ", " << c.resident << " per SM; of each " << c.steps << " K steps: arithmetic " << fixed(c.arithmetic)
       << ", loads " << fixed(c.load) << ", cluster " << fixed(c.cluster) << ", store " << fixed(c.store) << '\n';
  if (c.power > 0) text << "  tensor cores at the power limit " << fixed(c.power) << " us\n";
}

}  // namespace

std::string explain_terms(WeightOnlyMmProblem const& p, Target const& t, Choice const& chosen, bool tuned) {
  std::ostringstream text;
  add_terms(text, "chosen", chosen, p, t);
  auto const measured = measured_choice(p, t);
  if (tuned) {
    text << "  chosen as measured on this card by epiloq.tune\n";
  } else if (measured && describe(*measured) == describe(chosen)) {
    text << "  chosen as measured on this model of card (cost/measured.h)\n";
  }
  auto all = Selection::candidates(p, t);
  std::erase_if(all, [&](auto const& each) {
    return each.us == 0 || describe(each.choice) == describe(chosen);  // without a cost model
  });
  auto const next = std::min_element(all.begin(), all.end(), [](auto const& a, auto const& b) { return a.us < b.us; });
  if (next != all.end()) add_terms(text, "runner-up", next->choice, p, t);
  std::string result = text.str();
  result.pop_back();
  return result;
}

std::string describe(Choice const& choice) {
  std::ostringstream text;
  if (choice.family == Family::kDense) {
    text << "dequantise, then a dense product (" << choice.why << ')';
  } else if (choice.family == Family::kGemv) {
    GemvConfig const& c = kGemvRows[choice.row];
    text << "gemv " << c.panels << " panels of 16 weight rows, " << c.warps << " warps along K, stages " << c.stages
         << (c.digits ? ", tokens as digits" : "");
  } else if (choice.family == Family::kDecode) {
    DecodeConfig const& c = kDecodeRows[choice.row];
    text << "decode " << c.rows() << " weight rows x " << c.tokens << " tokens, " << c.warps() << " warps, "
         << c.k_groups << " along K";
  } else if (choice.family == Family::kWgmma) {
    WgmmaConfig const& c = kWgmmaRows[choice.row];
    text << "wgmma " << c.rows() << " weight rows x " << c.tokens << " tokens, " << c.warpgroups() << " warpgroups"
         << (c.k_groups > 1 ? ", " + std::to_string(c.k_groups) + " along K" : "")
         << (c.rounds ? ", weights rounded with their scales" : "");
  } else {
    TiledConfig const& c = kTiledRows[choice.row];
    text << "mma.sync " << c.rows() << " weight rows x " << c.tokens << " tokens, " << c.warps << " warps, stages "
         << c.stages4;
  }
  if (choice.split > 1) text << ", K over clusters of " << choice.split;
  return text.str();
}

}  // namespace epiloq::ops::weight_only_mm
