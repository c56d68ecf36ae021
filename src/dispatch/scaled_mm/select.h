#pragma once

// Kernel choice: a pure function of numbers, testable and explainable without a GPU.

#include <string>
#include <vector>

#include "core/target.h"
#include "dispatch/groupwise_mm/select.h"
#include "dispatch/tuning.h"
#include "epiloq/scaled_mm.h"

namespace epiloq::ops::scaled_mm {

// The last two write int8.
enum class Family {
  kGeneric,
  kGenericFloat8,
  kSkinny,
  kSm75,
  kSm80,
  kSm89,
  kSm90,
  kSm90Float8,
  kGroupwise,  // groupwise_mm's kernels with scales per row
  kGenericInt8,
  kSm80Int8
};

struct Choice {
  Family family;
  int row;                           // of the family's table in tables.h
  groupwise_mm::Choice groupwise{};  // of kGroupwise
};

std::string describe(Choice const& choice);

// For dispatch/tuning.h.
struct Selection {
  using Problem = ScaledMmProblem;
  using Choice = scaled_mm::Choice;
  static constexpr char const* kName = "scaled_mm";

  static std::string key(Problem const& problem);
  static std::vector<tuning::Timed<Choice>> candidates(Problem const& problem, Target const& target);
  static Choice choose(Problem const& problem, Target const& target);
  static double rank(tuning::Timed<Choice> const& candidate, Problem const& problem, Target const& target);
  static std::string terms(Choice const& choice, Problem const& problem, Target const& target);
};

}  // namespace epiloq::ops::scaled_mm
