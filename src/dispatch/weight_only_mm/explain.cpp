#include <sstream>

#include "dispatch/weight_only_mm/cost/measured.h"
#include "dispatch/weight_only_mm/cost/model.h"
#include "dispatch/weight_only_mm/select.h"

namespace epiloq::ops::weight_only_mm {

// The terms of cost/model.h.
std::string Selection::terms(Choice const& choice, Problem const& p, Target const& t) {
  using tuning::fixed;
  if (choice.family == Family::kTiled) return "  no cost model: the narrowest tile that holds all tokens\n";
  if (choice.family == Family::kDense) return "  expected " + fixed(time_of_dense(p, t)) + " us\n";
  std::ostringstream text;
  Cost const c = cost_of(choice, p, t);
  text << "  expected " << fixed(c.us) << " us: start " << fixed(c.start) << " + first load " << fixed(c.first_load)
       << " + the longer of memory and SMs\n"
       << "  memory " << fixed(c.memory) << " us: " << fixed(static_cast<double>(c.bytes) * 1e-6)
       << " MB of weights at " << fixed(kSm90Costs.hardware.memory_efficiency * t.memory_gb_s, 0) << " GB/s\n"
       << "  SMs " << fixed(c.sms) << " us: " << c.ctas << " CTAs in " << c.waves << (c.waves == 1 ? " wave" : " waves")
       << ", " << c.resident << " per SM; K steps per CTA " << c.steps << ": arithmetic " << fixed(c.arithmetic)
       << ", loads " << fixed(c.load) << ", cluster " << fixed(c.cluster) << ", store " << fixed(c.store) << '\n';
  if (c.power > 0) text << "  tensor cores at the power limit " << fixed(c.power) << " us\n";
  return text.str();
}

std::string explain_terms(WeightOnlyMmProblem const& p, Target const& t, tuning::Chosen<Choice> const& chosen) {
  auto const measured = measured_choice(p, t);
  bool const by_measurement = measured && describe(*measured) == describe(chosen.choice);
  return tuning::explain_terms<Selection>(
      p, t, chosen, by_measurement ? "  chosen as measured on this model of card (cost/measured.h)\n" : "");
}

std::string describe(Choice const& choice) {
  std::ostringstream text;
  if (choice.family == Family::kDense) {
    text << "dequantise, then a dense product (" << choice.why << ')';
  } else if (choice.family == Family::kGemv) {
    GemvConfig const& c = kGemvRows[choice.row];
    text << "gemv " << c.panels << " panels of 16 weight rows, " << c.warps << " warps along K, stages " << c.stages
         << (c.integer ? ", tokens as integers" : "");
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
