#pragma once

// Kernel choice: a pure function of numbers, testable and explainable without a GPU.

#include <string>
#include <vector>

#include "core/target.h"
#include "dispatch/groupwise_mm/tables.h"
#include "dispatch/tuning.h"
#include "epiloq/groupwise_mm.h"

namespace epiloq::ops::groupwise_mm {

enum class Family { kGeneric, kSm90, kSm90ColumnScales, kSm90Int8Rows, kSm90Float8Rows, kMma };

struct Choice {
  Family family;
  int row;          // of the family's table in tables.h
  int split_k = 1;  // CTAs of a cluster that split K
};

Choice choose(GroupwiseMmProblem const& problem, Arch arch, int sm_count);
// SM90 with per-row scales whose rows start on 16 bytes, with or without experts; and the expected time of any tile in
// waves, the last or only one possibly with split K. (Without the cost for the next kernel.)
struct PerRowChoice {
  Choice choice;
  double ns;
};
PerRowChoice choose_per_row(GroupwiseMmProblem const& problem, int sm_count);
double expected_ns(Tile const& tile, GroupwiseMmProblem const& problem, int sm_count, int split_k = 1);
std::string describe(Choice const& choice);

// For dispatch/tuning.h.
struct Selection {
  using Problem = GroupwiseMmProblem;
  using Choice = groupwise_mm::Choice;
  static constexpr char const* kName = "groupwise_mm";

  static std::string key(Problem const& problem);
  static std::vector<tuning::Timed<Choice>> candidates(Problem const& problem, Target const& target);
  static Choice choose(Problem const& problem, Target const& target) {
    return groupwise_mm::choose(problem, target.arch, target.sm_count);
  }
  static std::string describe(Choice const& choice, Problem const&) { return groupwise_mm::describe(choice); }
};

}  // namespace epiloq::ops::groupwise_mm
