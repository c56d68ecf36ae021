#pragma once

// Kernel choice: a pure function of numbers, testable and explainable without a GPU.

#include <string>
#include <vector>

#include "core/target.h"
#include "dispatch/tuning.h"
#include "dispatch/weight_only_mm/candidates.h"
#include "dispatch/weight_only_mm/cost/costs.h"
#include "epiloq/weight_only_mm.h"

namespace epiloq::ops::weight_only_mm {

// Throws InvalidArgument if the requested kernel does not support the problem.
Choice choose(WeightOnlyMmProblem const& problem, Target const& target, WeightOnlyMmKernel const& kernel);
std::string describe(Choice const& choice);
// The cost model's terms of the chosen kernel and of the runner-up, a line each.
std::string explain_terms(WeightOnlyMmProblem const& problem, Target const& target,
                          tuning::Chosen<Choice> const& chosen);

// All candidates with the times that the cost model expects; empty if no kernel supports the problem.
std::vector<tuning::Timed<Choice>> timed_candidates(WeightOnlyMmProblem const& problem, Target const& target,
                                                    Costs const& costs = kSm90Costs);

// For dispatch/tuning.h.
struct Selection {
  using Problem = WeightOnlyMmProblem;
  using Choice = weight_only_mm::Choice;
  static constexpr char const* kName = "weight_only_mm";

  static std::string key(Problem const& problem);
  static std::vector<tuning::Timed<Choice>> candidates(Problem const& problem, Target const& target) {
    return timed_candidates(problem, target);
  }
  // Throws Unsupported if batch invariance is required, and no kernel sums K in one order for every number of tokens.
  static Choice choose(Problem const& problem, Target const& target);
  static std::string terms(Choice const& choice, Problem const& problem, Target const& target);
};

}  // namespace epiloq::ops::weight_only_mm
