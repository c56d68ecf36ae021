#pragma once

// Which kernel serves a problem: a pure function of numbers, so that it can be tested and explained without a GPU.

#include <string>

#include "core/target.h"
#include "ops/conv2d_int8/kernels.h"

namespace epiloq::ops::conv2d_int8 {

enum class Family { kTiled, kDepthwise };

struct Choice {
  Family family;
  int row;     // of kTiles
  int vector;  // neighbouring channels that are read at a time
};

// Throws Unsupported where no kernel can serve the problem.
Choice choose(Problem const& problem, Target const& target);
std::string describe(Choice const& choice);

// Whether runs of `count` output channels start on a multiple of their bytes, or of 16.
bool has_whole_runs(Problem const& problem, int count);

}  // namespace epiloq::ops::conv2d_int8
