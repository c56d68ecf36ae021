#pragma once

#include "gemm/config.h"

namespace epiloq::gemm {

// Whether a tile's K may be shared by two blocks of a cluster (sm90_groupwise_share.cuh): half of their sums fit the
// slots through which a tile leaves.
constexpr bool may_share_k(GroupwiseConfig const& config) { return config.rounds == 1 && config.n <= 64; }

}  // namespace epiloq::gemm
