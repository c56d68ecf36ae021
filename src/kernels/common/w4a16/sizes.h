#pragma once

// Footprint and occupancy of the weight-only kernels, for the cost models.

#include <algorithm>
#include <cstdint>

#include "core/ceil_div.h"
#include "core/target.h"
#include "epiloq/weight_only_mm.h"
#include "kernels/common/w4a16/stage_layout.h"
#include "problems/packed_layout.h"

namespace epiloq::ops::weight_only_mm {

inline std::int64_t padded(std::int64_t k) { return round_up(k, kPadding); }

inline std::int64_t group_of(WeightOnlyMmProblem const& p) {
  return p.group_size == -1 ? padded(p.k) : std::min(p.group_size, padded(p.k));
}

// Bytes of a K step of `rows` weight rows, with their parameters.
inline std::int64_t groups_in_step(WeightOnlyMmProblem const& p) {
  return std::max<std::int64_t>(1, kPadding / group_of(p));
}
inline int other_bytes(WeightOnlyMmProblem const& p) { return (p.offsets ? p.scale_bytes : 0) + p.zero_bytes; }
inline std::int64_t step_bytes(WeightOnlyMmProblem const& p, int rows) {
  return rows * (kPadding * p.bits / 8 + groups_in_step(p) * (p.scale_bytes + other_bytes(p)));
}

// The same in shared memory, per warp.
inline std::int64_t stage_bytes(WeightOnlyMmProblem const& p, int rows) {
  int const groups = static_cast<int>(groups_in_step(p));
  return StageLayout::of(p.bits, p.scale_bytes, other_bytes(p), rows / kPanelRows, groups).bytes;
}

// Bytes per microsecond.
inline double memory_rate(Target const& t) { return t.memory_gb_s * 1e3; }

// Resident CTAs per SM for a row of the decode or the WGMMA table. If one CTA per SM suffices, they are kept apart: two
// CTAs of a cluster would otherwise start on one SM while half of the SMs idle.
template <class Config>
int blocks_of_sm(Config const& c, std::int64_t tiles, int split, int sm_count) {
  return tiles <= clusters_at_once(split, 1, sm_count) ? 1 : resident_blocks(c);
}

}  // namespace epiloq::ops::weight_only_mm
