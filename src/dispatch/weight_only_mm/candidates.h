#pragma once

// The kernels that a problem may use: rows of the tables in tables.h that fit the device.

#include <cstdint>
#include <vector>

#include "core/target.h"
#include "dispatch/weight_only_mm/tables.h"
#include "epiloq/weight_only_mm.h"

namespace epiloq::ops::weight_only_mm {

using Family = WeightOnlyMmFamily;

struct Choice {
  Family family;
  int row = 0;           // of the family's table in tables.h
  int split = 1;         // CTAs of a cluster that split K
  char const* why = "";  // kDense: the reason
};

// Whether the decode and WGMMA kernels are candidates besides the GEMV; otherwise mma.sync tiles are.
bool has_sm90_kernels(WeightOnlyMmProblem const& problem, Target const& target);
// Whether the target has the row and its shared memory suffices.
bool is_available(Family family, int row, WeightOnlyMmProblem const& problem, Target const& target);
// Whether `split` CTAs of it may split K.
bool may_split(Family family, int row, int split, WeightOnlyMmProblem const& problem, Target const& target);

// All rows worth considering, with every split of K; without a dense product.
std::vector<Choice> kernels_of(WeightOnlyMmProblem const& problem, Target const& target);

// Per GEMV CTA, `split` of which split K.
std::int64_t gemv_bytes(GemvConfig const& config, WeightOnlyMmProblem const& problem, int split);

}  // namespace epiloq::ops::weight_only_mm
