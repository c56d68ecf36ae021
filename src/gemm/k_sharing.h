#pragma once

#include "gemm/config.h"

namespace epiloq::gemm {

// Whether a tile's K may be shared by two blocks of a cluster (sm90_groupwise_share.cuh). Sums of narrow ones go
// through the slots by which a tile leaves, and all tiles are shared. Those of others go into the ring of stages, when
// that has served: only a block's last tile can be shared, of those that do not fill a wave.
constexpr bool shares_last_wave(GroupwiseConfig const& config) {
  return config.rounds == 1 && config.m_groups > 1 && config.n > 64;
}
constexpr bool may_share_k(GroupwiseConfig const& config) {
  return config.rounds == 1 && (config.n <= 64 || shares_last_wave(config));
}

}  // namespace epiloq::gemm
