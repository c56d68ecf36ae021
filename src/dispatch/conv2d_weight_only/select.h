#pragma once

// Which kernel serves a problem: a pure function of numbers, so that it can be tested and explained without a GPU.

#include <string>

#include "core/target.h"
#include "epiloq/conv2d_weight_only.h"
#include "problems/conv2d_weight_only.h"

namespace epiloq::ops::conv2d_weight_only {

using Family = Conv2dWeightOnlyFamily;

struct Choice {
  Family family;
  int row = 0;           // of the family's table in tables.h
  int split = 1;         // blocks of a cluster, which share K
  char const* why = "";  // kDense: the reason
};

Choice choose(Problem const& problem, Target const& target);
// Throws InvalidArgument where the kernel asked for cannot serve the problem.
Choice choose(Problem const& problem, Target const& target, Conv2dWeightOnlyKernel const& kernel);
std::string describe(Choice const& choice);

}  // namespace epiloq::ops::conv2d_weight_only
