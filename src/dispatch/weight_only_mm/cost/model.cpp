#include "dispatch/weight_only_mm/cost/model.h"

#include <algorithm>
#include <cmath>

#include "kernels/common/occupancy.h"
#include "kernels/common/w4a16/sizes.h"
#include "kernels/sm90/w4a16/w4a16_stage_layout.h"

namespace epiloq::ops::weight_only_mm {
namespace {

// Several times that overlap, as a p-norm: the longest, and more the nearer the others are.
constexpr double kOverlap = 4;
double longer(double a, double b, double exponent = kOverlap) {
  return std::pow(std::pow(a, exponent) + std::pow(b, exponent), 1 / exponent);
}

double real(std::int64_t value) { return static_cast<double>(value); }

// How a kernel divides a problem.
struct Shape {
  int rows, tokens;            // of a CTA tile
  double used_tokens;          // of them, on average
  std::int64_t high, wide;     // tiles along N and M
  int resident;                // CTAs per SM, at most
  int k_groups;                // of a CTA, which alternate K steps
  int early;                   // K steps whose weights are issued before pdl_wait
  std::int64_t steps, rounds;  // K steps per CTA and per K group
  std::int64_t ctas_per_sm;    // resident CTAs on the busiest SM
  std::int64_t at_once;        // tiles

  std::int64_t tiles() const { return high * wide; }
  std::int64_t waves() const { return ceil_div(tiles(), at_once); }
};

Shape divide(int rows, int tokens, int k_groups, int early, WeightOnlyMmProblem const& p, int split) {
  Shape s{};
  s.rows = rows, s.tokens = tokens, s.k_groups = k_groups, s.early = early;
  s.high = ceil_div(p.n, rows), s.wide = ceil_div(p.m, tokens);
  s.used_tokens = real(p.m) / real(s.wide);
  s.steps = ceil_div(ceil_div(p.k, kPadding), split);
  s.rounds = ceil_div(s.steps, k_groups);
  return s;
}

void set_residency(Shape& s, int resident, int split, Target const& t) {
  s.resident = resident;
  s.at_once = clusters_at_once(split, resident, t);
  s.ctas_per_sm = std::min<std::int64_t>(resident, ceil_div(s.tiles(), clusters_at_once(split, 1, t)));
}

// Resident CTAs per SM of a GEMV row. Launches spread CTAs evenly.
int gemv_residents(int row, WeightOnlyMmProblem const& p, std::int64_t ctas, int split, Target const& t) {
  std::int64_t bytes = gemv_bytes(kGemvRows[row], p, split);
  if (t.arch == Arch::kSm90) {
    bytes = std::max<std::int64_t>(bytes, smem_for_ctas_per_sm(ceil_div(ctas, t.sm_count), t.shared_bytes));
  }
  std::int64_t const fit = (t.shared_bytes + kReservedPerCta) / (bytes + kReservedPerCta);
  return static_cast<int>(std::clamp<std::int64_t>(fit, 1, kGemvResidents[row][p.bits == 8]));
}

// A CTA's K steps. GEMV: a warp has a pipeline of its own, so that either its own time or the latency of its loads
// counts, unless the warps of all CTAs keep the SM's four schedulers busy.
Shape add_gemv(Cost& cost, int row, WeightOnlyMmProblem const& p, int split, Target const& t, Costs const& costs) {
  GemvConfig const& c = kGemvRows[row];
  WarpStep const& warp = costs.warp;
  int const panels = c.panels_of(p.bits), rows = panels * kPanelRows;
  Shape s = divide(rows, static_cast<int>(p.m), c.warps, c.warps * (c.stages - 1), p, split);
  set_residency(s, gemv_residents(row, p, s.tiles() * split, split, t), split, t);
  double const step =
      warp.gemv + panels * ((c.integer ? warp.integer_panel : warp.gemv_panel) + warp.copy * p.bits / 4);
  double const chain = real(s.rounds) * std::max(step, costs.hardware.latency / (c.stages - 1));
  double const issue = real(s.ctas_per_sm * s.steps) * step * warp.gemv_issue / 4;
  cost.arithmetic = longer(chain, issue);
  cost.store = real(s.ctas_per_sm * panels * c.warps * p.m) * warp.gemv_sum;
  return s;
}

// The decode kernel: warps of all K groups overlap but for the latency of a step.
Shape add_decode(Cost& cost, int row, WeightOnlyMmProblem const& p, int split, Target const& t, Costs const& costs) {
  DecodeConfig const& c = kDecodeRows[row];
  Shape s = divide(c.rows(), c.tokens, c.k_groups, early_steps(c.tokens), p, split);
  set_residency(s, blocks_of_sm(c, s.tiles(), split, t.sm_count), split, t);
  double const panel = costs.warp.decode_panel + costs.warp.decode_tokens * c.tokens / 8;
  cost.arithmetic = real(s.rounds) * costs.warp.decode + real(s.ctas_per_sm * s.steps * c.m_groups * c.panels) * panel;
  return s;
}

// The WGMMA kernel: warpgroups dequantise and multiply 64 rows at a time, and share the tensor cores.
Shape add_wgmma(Cost& cost, int row, WeightOnlyMmProblem const& p, int split, Target const& t, Costs const& costs) {
  WgmmaConfig const& c = kWgmmaRows[row];
  Shape s = divide(c.rows(), c.tokens, c.k_groups, early_steps(c.tokens), p, split);
  set_residency(s, 1, split, t);
  double const products = 64.0 * kPadding * c.tokens;
  double const block = costs.hardware.convert + products / (costs.hardware.tensor * 1e6);
  cost.arithmetic = real(s.steps * c.m_groups * c.blocks) * block;
  return s;
}

double factor_of(Choice const& choice, KernelFactors const& factors) {
  if (choice.family == Family::kGemv) return factors.gemv[choice.row];
  return choice.family == Family::kDecode ? factors.decode[choice.row] : factors.wgmma[choice.row];
}

}  // namespace

Cost cost_of(Choice const& choice, WeightOnlyMmProblem const& p, Target const& t, Costs const& costs) {
  Hardware const& hardware = costs.hardware;
  int const split = choice.split;
  bool const is_gemv = choice.family == Family::kGemv;
  Cost cost;
  auto const add = is_gemv ? add_gemv : choice.family == Family::kDecode ? add_decode : add_wgmma;
  Shape const s = add(cost, choice.row, p, split, t, costs);
  cost.ctas = s.tiles() * split, cost.waves = s.waves(), cost.resident = s.resident, cost.steps = s.steps;

  // Tiles of the same rows are neighbours: memory delivers their weights once.
  std::int64_t const step = step_bytes(p, s.rows);
  cost.bytes = s.high * ceil_div(p.k, kPadding) * step;
  cost.memory = real(cost.bytes) / (hardware.memory_efficiency * memory_rate(t));

  // An SM also loads tokens, once for each of its CTAs. A GEMV's few are read from L2 while the weights are loaded.
  double const tokens = s.used_tokens * kPadding * 2;
  if (!is_gemv) cost.load = real(s.ctas_per_sm * s.steps) * (real(step) + tokens) / (hardware.sm_load * 1e3);
  double const elements = s.rows * real(s.tokens);
  if (!is_gemv) cost.store = hardware.store * elements * 1e-3;
  if (split > 1) cost.cluster = hardware.cluster + hardware.dsmem * elements * 1e-4 * (split - 1) / split;
  double const wave = longer(cost.arithmetic, cost.load) + cost.cluster + cost.store;
  cost.sms = real(s.waves()) * wave + real(s.waves() - 1) * hardware.start / s.resident;

  // SMs that the last wave leaves free start the next kernel's CTAs, whose early weights load meanwhile.
  double const free = real(s.waves() * s.at_once - s.tiles()) / real(std::min(s.tiles(), s.at_once));
  double const early = std::min(1.0, real(s.early) / real(s.steps));
  double const hidden = t.arch == Arch::kSm90 ? std::min(1.0, free) * early : 0;
  cost.start = hardware.start;
  cost.first_load = hardware.latency * (1 - hidden);
  cost.us = cost.start + cost.first_load + longer(cost.memory, cost.sms, hardware.overlap);

  if (choice.family == Family::kWgmma) {
    double const products = real(s.tiles()) * elements * real(p.k);
    cost.power = products / (hardware.tensor_sustained * 1e6 * t.sm_count);
    cost.us = longer(cost.us, cost.power);
  }
  cost.us *= factor_of(choice, costs.factors);
  return cost;
}

double time_of_dense(WeightOnlyMmProblem const& p, Target const& t) {
  constexpr int kBytes = 2;  // of a dequantised weight
  double const weights = real(p.n) * real(p.k), bytes = weights * (kBytes + p.bits / 8.0);
  return kDenseTime.call + bytes / (kDenseTime.memory * memory_rate(t)) + weights * real(p.m) * kDenseTime.product;
}

}  // namespace epiloq::ops::weight_only_mm
