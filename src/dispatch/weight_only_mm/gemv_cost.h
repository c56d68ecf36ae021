#pragma once

// Footprint and time of the GEMV kernel.

#include <cstdint>

#include "core/target.h"
#include "dispatch/weight_only_mm/tables.h"
#include "epiloq/weight_only_mm.h"

namespace epiloq::ops::weight_only_mm {

// Per CTA, `split` of which split K.
std::int64_t gemv_bytes(GemvConfig const& config, WeightOnlyMmProblem const& problem, int split);

// By a row of kGemvRows (costs.h).
double gemv_time(int row, WeightOnlyMmProblem const& problem, int split, Target const& target);

}  // namespace epiloq::ops::weight_only_mm
