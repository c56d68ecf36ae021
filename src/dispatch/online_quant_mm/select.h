#pragma once

// Kernel choice: a pure function of numbers, testable and explainable without a GPU.

#include <string>
#include <vector>

#include "core/target.h"
#include "dispatch/tuning.h"
#include "epiloq/online_quant_mm.h"

namespace epiloq::ops::online_quant_mm {

// Size of a K step, to a multiple of which prepared weights are padded.
inline constexpr std::int64_t kStep = 128;

using Family = OnlineQuantFamily;

struct Choice {
  Family family;
  int row;        // of the family's table in tables.h
  int split = 1;  // CTAs of a cluster that split K
  int whole = 0;  // leading tiles whose K is not split
};

// Throws InvalidArgument if the requested kernel does not support the problem.
Choice choose(OnlineQuantProblem const& problem, Target const& target, OnlineQuantKernel const& kernel);
bool has_fused_kernel(std::int64_t group_size);
std::string describe(Choice const& choice, OnlineQuantProblem const& problem);

// For dispatch/tuning.h.
struct Selection {
  using Problem = OnlineQuantProblem;
  using Choice = online_quant_mm::Choice;
  static constexpr char const* kName = "online_quant_mm";

  static std::string key(Problem const& problem);
  static std::vector<tuning::Timed<Choice>> candidates(Problem const& problem, Target const& target);
  static Choice choose(Problem const& problem, Target const& target);
  static double rank(tuning::Timed<Choice> const& candidate, Problem const& problem, Target const& target);
  static std::string terms(Choice const& choice, Problem const& problem, Target const& target);
};

}  // namespace epiloq::ops::online_quant_mm
