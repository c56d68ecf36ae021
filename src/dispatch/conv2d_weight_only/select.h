#pragma once

// Kernel choice: a pure function of numbers, testable and explainable without a GPU.

#include <string>

#include "core/target.h"
#include "epiloq/conv2d_weight_only.h"
#include "problems/conv2d_weight_only.h"

namespace epiloq::ops::conv2d_weight_only {

using Family = Conv2dWeightOnlyFamily;

struct Choice {
  Family family;
  int row = 0;           // of the family's table in tables.h
  int split = 1;         // CTAs of a cluster that split K
  char const* why = "";  // kDense: the reason
};

Choice choose(Problem const& problem, Target const& target);
// Throws InvalidArgument if the requested kernel does not support the problem.
Choice choose(Problem const& problem, Target const& target, Conv2dWeightOnlyKernel const& kernel);
std::string describe(Choice const& choice);

}  // namespace epiloq::ops::conv2d_weight_only
