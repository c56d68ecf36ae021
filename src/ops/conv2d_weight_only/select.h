#pragma once

// Which kernel serves a problem: a pure function of numbers, so that it can be tested and explained without a GPU.

#include <string>

#include "core/target.h"
#include "ops/conv2d_weight_only/kernels.h"

namespace epiloq::ops::conv2d_weight_only {

// kDense: de-quantise the weight, then convolve densely.
enum class Family { kDense, kPatches, kDepthwise };

struct Choice {
  Family family;
  int row = 0;           // of kRows
  int split = 1;         // blocks of a cluster, which share K
  char const* why = "";  // kDense: the reason
};

Choice choose(Problem const& problem, Target const& target);
std::string describe(Choice const& choice);

}  // namespace epiloq::ops::conv2d_weight_only
