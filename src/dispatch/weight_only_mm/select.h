#pragma once

// Which kernel serves a problem: a pure function of numbers, so that it can be tested and explained without a GPU.

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
  int split = 1;         // blocks of a cluster, which share K
  char const* why = "";  // kDense: the reason
};

Choice choose(WeightOnlyMmProblem const& problem, Target const& target);
// Throws InvalidArgument where the kernel asked for cannot serve the problem.
Choice choose(WeightOnlyMmProblem const& problem, Target const& target, WeightOnlyMmKernel const& kernel);
std::string describe(Choice const& choice);

// Why no kernel takes the problem, whatever its tokens; null where one does.
char const* why_dense(WeightOnlyMmProblem const& problem, Target const& target);

// A row of another's table of the wgmma kernel: whether a block's shared memory holds it, and microseconds.
bool fits(WgmmaConfig const& config, WeightOnlyMmProblem const& problem, Target const& target);
double time_of(WgmmaConfig const& config, TileTimes const& times, WeightOnlyMmProblem const& problem, int split,
               Target const& target);

// That a tile asks for: its ring of stages, then its sums.
std::int64_t shared_bytes(TiledConfig const& config, WeightOnlyMmProblem const& problem);

// The blocks of a cluster that share K, so that all are done soonest: as many at a time as the SMs hold, each its steps
// of K and `fixed` steps' worth of time to begin and to end.
int best_split(std::int64_t blocks, std::int64_t steps, int fixed, int blocks_per_sm, Target const& target);

}  // namespace epiloq::ops::weight_only_mm
