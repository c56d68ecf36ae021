#pragma once

// What a stream takes: shared memory, and time.

#include <cstdint>

#include "core/target.h"
#include "dispatch/weight_only_mm/tables.h"
#include "epiloq/weight_only_mm.h"

namespace epiloq::ops::weight_only_mm {

// Of a block, `split` of which share K.
std::int64_t gemv_bytes(GemvConfig const& config, WeightOnlyMmProblem const& problem, int split);

// By a row of kGemvRows (costs.h).
double gemv_time(int row, WeightOnlyMmProblem const& problem, int split, Target const& target);

}  // namespace epiloq::ops::weight_only_mm
