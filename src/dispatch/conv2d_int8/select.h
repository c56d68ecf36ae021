#pragma once

// Which kernel serves a problem: a pure function of numbers, so that it can be tested and explained without a GPU.

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
  int vector;     // neighbouring channels that are read at a time
  int split = 1;  // blocks of a cluster, which share the columns
};

// Throws Unsupported where no kernel can serve the problem, InvalidArgument where the one asked for cannot.
Choice choose(Problem const& problem, Target const& target, std::optional<Conv2dInt8Kernel> const& kernel);
std::string describe(Choice const& choice);

}  // namespace epiloq::ops::conv2d_int8
