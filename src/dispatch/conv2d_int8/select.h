#pragma once

// Kernel choice: a pure function of numbers, testable and explainable without a GPU.

#include <optional>
#include <string>

#include "core/target.h"
#include "epiloq/conv2d_int8.h"
#include "problems/conv2d_int8.h"

namespace epiloq::ops::conv2d_int8 {

enum class Family { kTiled, kDepthwise };

struct Choice {
  Family family;
  int row;        // of kTiles
  int vector;     // neighbouring channels per copy
  int split = 1;  // CTAs of a cluster that split the columns
};

// Throws Unsupported if no kernel supports the problem, InvalidArgument if the requested one does not.
Choice choose(Problem const& problem, Target const& target, std::optional<Conv2dInt8Kernel> const& kernel);
std::string describe(Choice const& choice);

}  // namespace epiloq::ops::conv2d_int8
