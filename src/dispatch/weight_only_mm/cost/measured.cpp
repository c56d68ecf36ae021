#include "dispatch/weight_only_mm/cost/measured.h"

#include <cstdlib>

#include "dispatch/tuning.h"
#include "kernels/common/w4a16/sizes.h"

namespace epiloq::ops::weight_only_mm {
namespace {

// Memory clocks of one model of GPU differ by a few percent between hosts; those of an H100 and an H200 by more.
bool is_same_card(int memory_gb_s, int other) { return std::abs(memory_gb_s - other) * 20 <= other; }

}  // namespace

std::optional<Choice> measured_choice(WeightOnlyMmProblem const& p, Target const& t) {
  if (t.sm_count != kMeasuredSms || p.k == 0 || groups_in_step(p) > 1) return std::nullopt;
  for (Measured const& row : kMeasured) {
    if (!is_same_card(row.memory_gb_s, t.memory_gb_s) || row.n != p.n || row.k != p.k || row.bits != p.bits) continue;
    auto const own = tuning::tokens_of(p.m), measured = tuning::tokens_of(row.m);
    if (own.bucket != measured.bucket || own.whole != measured.whole) continue;
    auto const& [family, index, split, why] = row.choice;
    if (is_available(family, index, p, t) && may_split(family, index, split, p, t)) return row.choice;
  }
  return std::nullopt;
}

}  // namespace epiloq::ops::weight_only_mm
