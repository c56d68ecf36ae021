#pragma once

// Which kernel serves a problem: a pure function of numbers, so that it can be tested and explained without a GPU.

#include <string>

#include "core/target.h"
#include "epiloq/online_quant_mm.h"

namespace epiloq::ops::online_quant_mm {

// Values of K that kernels step by, and that prepared weights are padded to.
inline constexpr std::int64_t kStep = 128;

using Family = OnlineQuantFamily;

struct Choice {
  Family family;
  int row;        // of the family's table in tables.h
  int split = 1;  // blocks of a cluster that share K
  int whole = 0;  // of the first tiles, so many whose K they do not share
};

Choice choose(OnlineQuantProblem const& problem, Target const& target);
// Throws InvalidArgument where the kernel asked for cannot serve the problem.
Choice choose(OnlineQuantProblem const& problem, Target const& target, OnlineQuantKernel const& kernel);
bool has_fused_kernel(std::int64_t group_size);
std::string describe(Choice const& choice, OnlineQuantProblem const& problem);

}  // namespace epiloq::ops::online_quant_mm
