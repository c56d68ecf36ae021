#pragma once

#include <optional>
#include <string>

#include "core/target.h"
#include "epiloq/grouped_weight_only_mm.h"
#include "kernels/launch/grouped_weight_only_mm.h"

namespace epiloq::ops::grouped_weight_only_mm {

struct Choice {
  Format format;
  int row;    // of kRows, or of kGemvRows
  int tiles;  // of tokens, at most
  int split;
  bool gemv = false;
};

// Null if no kernel takes the weight: its group size, or bits other than 4 and 8.
std::optional<Format> format_of(weight_only_mm::Weight const& weight, WeightFormat format);

// A GEMV for few tokens by one matrix of FP4 weights, unless sums are to be batch invariant. Otherwise the narrowest
// tile that holds an expert's rows on average. K is split so that the CTAs fill the device.
Choice choose(Problem const& problem, Format format, Target const& target);
// A tile that is given. Throws InvalidArgument where there is no such kernel, or it does not fit.
Choice choose(Problem const& problem, Format format, Target const& target, GroupedWeightOnlyMmKernel const& kernel);

std::string describe(Choice const& choice);

}  // namespace epiloq::ops::grouped_weight_only_mm
