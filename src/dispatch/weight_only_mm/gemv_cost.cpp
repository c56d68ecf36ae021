#include "dispatch/weight_only_mm/gemv_cost.h"

#include <algorithm>
#include <cmath>

#include "dispatch/weight_only_mm/costs.h"
#include "kernels/common/occupancy.h"
#include "kernels/common/w4a16/sizes.h"
#include "kernels/common/w4a16/split_k.h"

namespace epiloq::ops::weight_only_mm {
namespace {

// Resident CTAs per SM; launches spread CTAs evenly.
int residents(int row, WeightOnlyMmProblem const& p, int split, std::int64_t blocks, Target const& t) {
  std::int64_t const own_bytes = gemv_bytes(kGemvRows[row], p, split);
  bool const spreads = t.arch == Arch::kSm90;
  std::int64_t const bytes =
      spreads ? std::max<std::int64_t>(own_bytes, smem_for_ctas_per_sm(ceil_div(blocks, t.sm_count), t.shared_bytes))
              : own_bytes;
  std::int64_t const fit = (t.shared_bytes + kReservedPerCta) / (bytes + kReservedPerCta);
  return static_cast<int>(std::clamp<std::int64_t>(fit, 1, kGemvTimes[row].resident[p.bits == 8]));
}

}  // namespace

// Per CTA: receive slots, then the warps' pipelines, in whose place their sums come.
std::int64_t gemv_bytes(GemvConfig const& c, WeightOnlyMmProblem const& p, int split) {
  int const rows = c.panels_of(p.bits) * kPanelRows;
  int const received = gemv_received_bytes(static_cast<int>(p.m), rows, split);
  return received + c.warps * std::max<std::int64_t>(c.stages * (stage_bytes(p, rows) + p.m * kPadding * 2) +
                                                         (c.digits ? p.m * kDigitBytes : 0),
                                                     c.tokens() * (rows + 4) * 4);
}

double gemv_time(int row, WeightOnlyMmProblem const& p, int split, Target const& t) {
  GemvConfig const& c = kGemvRows[row];
  GemvTime const& time = kGemvTimes[row];
  GemvStep const& work = kGemvSteps[p.bits == 8][c.digits];
  int const panels = c.panels_of(p.bits), rows = panels * kPanelRows;
  std::int64_t const all = ceil_div(p.n, rows);  // clusters
  int const resident = residents(row, p, split, all * split, t);
  double const m = static_cast<double>(p.m);
  double const steps = static_cast<double>(ceil_div(ceil_div(p.k, kPadding), split));
  double const step = work.step + panels * (work.panel + work.panel_token * m) + work.token * m;
  double const waiting = std::ceil(steps / c.warps) * kGemvTime.latency * time.wait / (c.stages - 1 + kGemvTime.own);
  auto const wave = [&](std::int64_t clusters_now) {
    if (clusters_now == 0) return 0.0;
    std::int64_t const blocks = clusters_now * split;
    // The CTAs of a cluster are placed side by side even if other SMs are free.
    std::int64_t const even = ceil_div(blocks, t.sm_count), beside_own = std::min(resident, split);
    std::int64_t const beside = std::min<std::int64_t>(resident, split > 1 ? std::max(even, beside_own) : even);
    double const multiplying = static_cast<double>(beside) * steps * step / 4 * time.work[p.bits == 8];
    double const reading = static_cast<double>(blocks) * steps * static_cast<double>(step_bytes(p, rows)) /
                           (kGemvTime.read_rate * memory_rate(t));
    auto const raised = [](double value) { return std::pow(value, kGemvTime.power); };
    double const adding = static_cast<double>(beside) * panels * c.warps * kGemvTime.sum;
    return std::pow(raised(multiplying) + raised(waiting) + raised(reading), 1 / kGemvTime.power) + adding;
  };
  std::int64_t const seats = clusters(split, resident, t), full = all / seats, rest = all % seats;
  double const waves = std::max(1.0, static_cast<double>(all) / static_cast<double>(seats));
  double const sharing = split > 1 ? waves * (kGemvTime.cluster + kGemvTime.cluster_block * split) : 0;
  return static_cast<double>(full) * wave(seats) + wave(rest) + kGemvTime.kernel + sharing;
}

}  // namespace epiloq::ops::weight_only_mm
