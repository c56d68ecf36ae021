#pragma once

// Kernel choice of w4a8_mm: a pure function of numbers.

#include <cstdint>
#include <string>
#include <vector>

#include "core/target.h"
#include "dispatch/tuning.h"
#include "epiloq/w4a8_mm.h"

namespace epiloq::ops::w4a8_mm {

struct Choice {
  int row;        // of kRows
  int split = 1;  // CTAs of a cluster that split K
};

std::string describe(Choice const& choice);

// For dispatch/tuning.h.
struct Selection {
  using Problem = W4a8Problem;
  using Choice = w4a8_mm::Choice;
  static constexpr char const* kName = "w4a8_mm";

  static std::string key(Problem const& p) {
    return tuning::key_of(kName, p.m, p.n, p.k) + " group=" + std::to_string(p.group_size);
  }
  static std::vector<tuning::Timed<Choice>> candidates(Problem const& problem, Target const& target);
  static Choice choose(Problem const& problem, Target const& target);
  static std::string terms(Choice const& choice, Problem const& problem, Target const& target);
};

}  // namespace epiloq::ops::w4a8_mm
