#include "dispatch/weight_only_mm/select.h"

#include <algorithm>
#include <limits>
#include <sstream>

#include "dispatch/w4a16_limits.h"
#include "dispatch/weight_only_mm/cost/measured.h"
#include "dispatch/weight_only_mm/cost/model.h"
#include "dispatch/weight_only_mm/tables.h"
#include "epiloq/error.h"
#include "kernels/common/w4a16/sizes.h"

namespace epiloq::ops::weight_only_mm {
namespace {

using Timed = tuning::Timed<Choice>;

// Keeps the first of equally fast candidates.
struct Best {
  Timed timed{{Family::kDense, 0, 1, "no kernel fits the shared memory"}, std::numeric_limits<double>::infinity()};

  void consider(Timed const& other) {
    if (other.us < timed.us) timed = other;
  }
};

constexpr Choice kLargeM{Family::kDense, 0, 1, "large M"};

// The candidate that the cost model expects to be the fastest.
Choice fastest(WeightOnlyMmProblem const& p, Target const& t) {
  Best best;
  for (Timed const& candidate : timed_candidates(p, t)) {
    if (candidate.choice.family != Family::kTiled) best.consider(candidate);
  }
  return best.timed.choice;
}

// The narrowest tile that holds all tokens, or else the widest.
Choice tiled_choice(WeightOnlyMmProblem const& p, Target const& t) {
  int chosen = -1;
  for (int row = 0; row < static_cast<int>(kTiledRows.size()); ++row) {
    if (!is_available(Family::kTiled, row, p, t)) continue;
    bool const wider = chosen < 0 || kTiledRows[row].tokens > kTiledRows[chosen].tokens;
    if (chosen < 0 || (wider && kTiledRows[chosen].tokens < p.m)) chosen = row;
  }
  if (chosen < 0) return {Family::kDense, 0, 1, "no kernel fits the shared memory"};
  TiledConfig const& config = kTiledRows[chosen];
  std::int64_t const blocks = ceil_div(p.n, config.rows()) * ceil_div(p.m, config.tokens);
  return {Family::kTiled, chosen, best_split(blocks, ceil_div(p.k, kPadding), config.blocks, t)};
}

// Exact weights by two K groups: all such rows sum a scale group's columns in order, and alternate K steps. Two
// partial sums commute, so K may be split in two, too; in which order more are added depends on the tokens of a tile.
bool keeps_order(WgmmaConfig const& c) { return c.k_groups == 2 && !c.rounds; }

// The fastest such row, split as is best for small M.
Choice in_one_order(WeightOnlyMmProblem const& p, Target const& t) {
  constexpr int kMostSplit = 2;
  int const few = kWgmmaRows.front().tokens;
  auto const fastest_of = [&](WeightOnlyMmProblem const& problem, int first_split, int last_split) {
    Best best;
    for (int row = 0; row < static_cast<int>(kWgmmaRows.size()); ++row) {
      WgmmaConfig const& c = kWgmmaRows[row];
      if (!keeps_order(c) || !is_available(Family::kWgmma, row, problem, t)) continue;
      if (c.tokens != few && c.tokens >= 2 * problem.m) continue;
      for (int split = first_split; split <= last_split; ++split) {
        Choice const choice{Family::kWgmma, row, split};
        best.consider({choice, cost_of(choice, problem, t).us});
      }
    }
    return best.timed.choice;
  };
  WeightOnlyMmProblem of_few = p;
  of_few.m = few / 2;
  auto const most = static_cast<int>(std::min<std::int64_t>(ceil_div(p.k, kPadding), kMostSplit));
  int const split = fastest_of(of_few, 1, most).split;
  return fastest_of(p, split, split);
}

// Kernels that sum K in one order for every number of tokens.
Choice choose_batch_invariant(WeightOnlyMmProblem const& p, Target const& t) {
  Choice choice{Family::kDense, 0, 1, why_dense(p, t)};
  if (choice.why == nullptr) choice = has_sm90_kernels(p, t) ? in_one_order(p, t) : tiled_choice(p, t);
  if (choice.family != Family::kDense) {
    if (choice.family == Family::kTiled) choice.split = 1;
    return choice;
  }
  throw Unsupported(std::string("epiloq.weight_only_mm: batch_invariant: no kernel for this product (") + choice.why +
                    "), and the dense product that takes its place sums K in an order that depends on M");
}

}  // namespace

// A dense product is a candidate if weights may be rounded. mma.sync tiles have no cost model.
std::vector<Timed> timed_candidates(WeightOnlyMmProblem const& p, Target const& t, Costs const& costs) {
  std::vector<Timed> all;
  if (why_dense(p, t) != nullptr) return all;
  if (p.m > kExactTokens) all.push_back({kLargeM, time_of_dense(p, t)});
  for (Choice const& choice : kernels_of(p, t)) {
    all.push_back({choice, choice.family == Family::kTiled ? 0 : cost_of(choice, p, t, costs).us});
  }
  return all;
}

Choice Selection::choose(WeightOnlyMmProblem const& p, Target const& t) {
  if (p.batch_invariant) return choose_batch_invariant(p, t);
  if (char const* why = why_dense(p, t)) return {Family::kDense, 0, 1, why};
  if (has_sm90_kernels(p, t)) {
    if (auto const measured = measured_choice(p, t)) return *measured;
    return fastest(p, t);
  }
  if (p.m >= kDenseTokens) return kLargeM;
  if (p.m <= kGemvTokens) return fastest(p, t);
  return tiled_choice(p, t);
}

Choice choose(WeightOnlyMmProblem const& p, Target const& t, WeightOnlyMmKernel const& kernel) {
  char const* why = why_dense(p, t);
  if (why == nullptr && !is_available(kernel.family, kernel.row, p, t)) {
    why =
        "no such row, not built for this architecture, not made for this M, for offsets or for 2 and 3 bits, or "
        "too large for its shared memory";
  }
  if (kernel.split < 1 || kernel.split > most_split(ceil_div(p.k, kPadding), t)) why = "no such split";
  if (why == nullptr && !may_split(kernel.family, kernel.row, kernel.split, p, t)) {
    why = "no shared memory for the partial sums of so many CTAs";
  }
  if (why != nullptr)
    throw InvalidArgument(
        std::string("epiloq.weight_only_mm: kernel: expected one that fits, got one that does not: ") + why);
  return {kernel.family, kernel.row, kernel.split};
}

std::string Selection::key(WeightOnlyMmProblem const& p) {
  std::ostringstream text;
  text << tuning::key_of(kName, p.m, p.n, p.k) << " bits=" << p.bits << " group=" << group_of(p)
       << " x=" << name(p.dtype) << " scale=" << p.scale_bytes << " zero=" << p.zero_bytes;
  if (!p.aligned) text << " unaligned";
  if (p.offsets) text << " offsets";
  if (!p.same_type) text << " mixed";
  return text.str();
}

}  // namespace epiloq::ops::weight_only_mm
