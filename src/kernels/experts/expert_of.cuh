#pragma once

#include <cstdint>

#include "problems/experts/expert_routing.h"

namespace epiloq::ops::expert_routing {

// The expert of a row; their number for rows without one here, which come after all others.
__device__ __forceinline__ int expert_of(SortProblem const& p, int row) {
  std::int64_t const expert = p.expert_of_row[row];
  return expert >= 0 && expert < p.experts ? static_cast<int>(expert) : p.experts;
}

}  // namespace epiloq::ops::expert_routing
