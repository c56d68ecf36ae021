#pragma once

#include <optional>
#include <string>

#include "core/target.h"
#include "epiloq/grouped_weight_only_mm.h"
#include "kernels/launch/grouped_weight_only_mm.h"

namespace epiloq::ops::grouped_weight_only_mm {

struct Choice {
  Format format;
  int row;
  int tiles;  // of tokens, at most
  int split;
};

// Null if no kernel takes the weight: its group size, or bits other than 4 and 8.
std::optional<Format> format_of(weight_only_mm::Weight const& weight, WeightFormat format);

// The narrowest tile that holds an expert's rows on average; K split so that the CTAs fill the device.
Choice choose(Problem const& problem, Format format, Target const& target);
// One that is given. Throws InvalidArgument where there is no such kernel, or it does not fit.
Choice choose(Problem const& problem, Format format, Target const& target, GroupedWeightOnlyMmKernel const& kernel);

std::string describe(Choice const& choice);

}  // namespace epiloq::ops::grouped_weight_only_mm
