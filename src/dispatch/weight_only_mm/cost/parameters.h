#pragma once

// The cost model's numbers as a list, for tools/tune.py to fit.

#include <string>
#include <utility>
#include <vector>

#include "dispatch/weight_only_mm/cost/costs.h"

namespace epiloq::ops::weight_only_mm {

// Each number by name, in costs.h's order.
std::vector<std::pair<std::string, double>> parameters_of(Costs const& costs);

// The inverse. Throws InvalidArgument for another number of values.
Costs with_parameters(std::vector<double> const& values);

}  // namespace epiloq::ops::weight_only_mm
