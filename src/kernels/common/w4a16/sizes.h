#pragma once

// Bytes of steps and blocks, and how many run at a time: what choices are made from.

#include <algorithm>
#include <cstdint>

#include "core/ceil_div.h"
#include "core/target.h"
#include "epiloq/weight_only_mm.h"
#include "kernels/common/w4a16/config.h"
#include "problems/packed_layout.h"

namespace epiloq::ops::weight_only_mm {

inline std::int64_t padded(std::int64_t k) { return round_up(k, kPadding); }

inline std::int64_t group_of(WeightOnlyMmProblem const& p) {
  return p.group_size == -1 ? padded(p.k) : std::min(p.group_size, padded(p.k));
}

// Bytes of a step of so many weight rows, with their parameters.
inline std::int64_t groups_in_step(WeightOnlyMmProblem const& p) {
  return std::max<std::int64_t>(1, kPadding / group_of(p));
}
inline std::int64_t step_bytes(WeightOnlyMmProblem const& p, int rows) {
  int const parameter_bytes = p.scale_bytes * (p.offsets ? 2 : 1) + p.zero_bytes;
  return rows * (kPadding * p.bits / 8 + groups_in_step(p) * parameter_bytes);
}

// The same in shared memory, of a warp.
inline std::int64_t stage_bytes(WeightOnlyMmProblem const& p, int rows) {
  return whole_lines(static_cast<int>(step_bytes(p, rows)));
}

// Bytes a microsecond.
inline double memory_rate(Target const& t) { return t.memory_gb_s * 1e3; }

// Clusters of so many blocks that run at a time, each SM holding `resident` blocks.
inline std::int64_t clusters(int split, int resident, int sm_count) {
  return std::max<std::int64_t>(1, kClusters[0][split - 1] * sm_count / kSmsOfClusters) * resident;
}
inline std::int64_t clusters(int split, int resident, Target const& t) { return clusters(split, resident, t.sm_count); }

// Blocks of a row of the ring or the wgmma table that an SM has beside each other. As two of a cluster would begin side
// by side with half of the SMs idle, those that fit one to an SM are kept apart.
template <class Config>
int blocks_of_sm(Config const& c, std::int64_t tiles, int split, int sm_count) {
  return tiles <= clusters(split, 1, sm_count) ? 1 : resident_blocks(c);
}

}  // namespace epiloq::ops::weight_only_mm
