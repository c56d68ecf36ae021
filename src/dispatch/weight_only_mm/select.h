#pragma once

// Kernel choice: a pure function of numbers, testable and explainable without a GPU.

#include <string>
#include <vector>

#include "core/target.h"
#include "dispatch/tuning.h"
#include "dispatch/weight_only_mm/costs.h"
#include "dispatch/weight_only_mm/tables.h"
#include "epiloq/batch_invariant.h"
#include "epiloq/weight_only_mm.h"

namespace epiloq::ops::weight_only_mm {

using Family = WeightOnlyMmFamily;

struct Choice {
  Family family;
  int row = 0;           // of the family's table in tables.h
  int split = 1;         // CTAs of a cluster that split K
  char const* why = "";  // kDense: the reason
};

Choice choose(WeightOnlyMmProblem const& problem, Target const& target);
// Batch invariance (batch_invariant.h): kernels that sum K in one order for every number of tokens; throws Unsupported
// if there is none.
Choice choose_batch_invariant(WeightOnlyMmProblem const& problem, Target const& target);
// Throws InvalidArgument if the requested kernel does not support the problem.
Choice choose(WeightOnlyMmProblem const& problem, Target const& target, WeightOnlyMmKernel const& kernel);
std::string describe(Choice const& choice);

// For dispatch/tuning.h.
struct Selection {
  using Problem = WeightOnlyMmProblem;
  using Choice = weight_only_mm::Choice;
  static constexpr char const* kName = "weight_only_mm";

  static std::string key(Problem const& problem);
  static std::vector<tuning::Timed<Choice>> candidates(Problem const& problem, Target const& target);
  static Choice choose(Problem const& problem, Target const& target) {
    return batch_invariant() ? choose_batch_invariant(problem, target) : weight_only_mm::choose(problem, target);
  }
  static std::string describe(Choice const& choice, Problem const&) { return weight_only_mm::describe(choice); }
};

// Why no kernel supports the problem with any number of tokens; null if one does.
char const* why_dense(WeightOnlyMmProblem const& problem, Target const& target);

// For another operation's table of the WGMMA kernel: whether a CTA's shared memory holds the tile, and its time in
// microseconds.
bool fits(WgmmaConfig const& config, WeightOnlyMmProblem const& problem, Target const& target);
double time_of(WgmmaConfig const& config, TileTimes const& times, WeightOnlyMmProblem const& problem, int split,
               Target const& target);

// Per CTA: its stages, in whose place its sums come.
std::int64_t shared_bytes(TiledConfig const& config, WeightOnlyMmProblem const& problem);

// The split of K that finishes first: as many CTAs at a time as the SMs hold, each with its K steps and `fixed` steps'
// worth of overhead.
int best_split(std::int64_t blocks, std::int64_t steps, int fixed, int blocks_per_sm, Target const& target);

}  // namespace epiloq::ops::weight_only_mm
