#pragma once

// Kernel choice: a pure function of numbers, testable and explainable without a GPU.

#include <string>

#include "core/target.h"
#include "dispatch/weight_only_mm/costs.h"
#include "dispatch/weight_only_mm/tables.h"
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
