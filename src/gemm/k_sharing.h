#pragma once

#include "gemm/config.h"

namespace epiloq::gemm {

// Whether a tile's K may be shared by two blocks of a cluster (sm90_groupwise_share.cuh): their sums meet in slots that
// have room for as much.
constexpr bool may_share_k(GroupwiseConfig const& config) { return config.rounds == 1 && config.n <= 64; }

}  // namespace epiloq::gemm
