#pragma once

// Limits of the kernels for packed weights, shared by the operations that have tables of them: weight_only_mm and
// conv2d_weight_only, whose tokens are output pixels.

#include <cstdint>

#include "core/target.h"
#include "epiloq/weight_only_mm.h"
#include "kernels/common/w4a16/config.h"

namespace epiloq::ops::weight_only_mm {

// Why no kernel supports the problem with any number of tokens; null if one does. (2 and 3 bits: weight_only_mm's.)
char const* why_dense(WeightOnlyMmProblem const& problem, Target const& target);

// Whether a CTA's shared memory holds the tile.
bool fits(TiledConfig const& config, WeightOnlyMmProblem const& problem, Target const& target);
bool fits(DecodeConfig const& config, WeightOnlyMmProblem const& problem, Target const& target);
bool fits(WgmmaConfig const& config, WeightOnlyMmProblem const& problem, Target const& target);

// Shared memory of a CTA: the larger of its stages and its sums, which overwrite them.
std::int64_t shared_bytes(TiledConfig const& config, WeightOnlyMmProblem const& problem);

// The split of K that finishes first: as many CTAs at a time as the SMs hold, each with its K steps and overhead.
int best_split(std::int64_t blocks, std::int64_t steps, int blocks_per_sm, Target const& target);

}  // namespace epiloq::ops::weight_only_mm
