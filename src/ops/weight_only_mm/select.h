#pragma once

// Which kernel serves a problem: a pure function of numbers, so that it can be tested and explained without a GPU.

#include <string>

#include "core/target.h"
#include "epiloq/weight_only_mm.h"

namespace epiloq::ops::weight_only_mm {

using Family = WeightOnlyMmFamily;

struct Choice {
  Family family;
  int row = 0;           // of the family's table in configs.h
  int split = 1;         // blocks of a cluster, which share K
  char const* why = "";  // kDense: the reason
};

Choice choose(WeightOnlyMmProblem const& problem, Target const& target);
// Throws InvalidArgument where the kernel asked for cannot serve the problem.
Choice choose(WeightOnlyMmProblem const& problem, Target const& target, WeightOnlyMmKernel const& kernel);
std::string describe(Choice const& choice);

// What an architecture's first card has, for answers without a device.
Target nominal(Arch arch);

}  // namespace epiloq::ops::weight_only_mm
