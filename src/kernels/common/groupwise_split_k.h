#pragma once

#include <cstdint>

#include "kernels/common/tile_config.h"

namespace epiloq::gemm {

// Whether a tile's K may be shared by two blocks of a cluster (groupwise_split_k.cuh). Sums of narrow ones go
// through the slots by which a tile leaves, and all tiles are shared. Those of others go into the ring of stages, when
// that has served: only a block's last tile can be shared, of those that do not fill a wave.
constexpr bool splits_last_wave(GroupwiseConfig const& config) {
  return config.rounds == 1 && config.m_groups > 1 && config.n > 64;
}
constexpr bool may_split_k(GroupwiseConfig const& config) {
  return config.rounds == 1 && (config.n <= 64 || splits_last_wave(config));
}

// How many of a problem's tiles two blocks would share: all of them, or those of a last wave; none if they are more
// than pairs of SMs.
constexpr std::int64_t split_tiles(GroupwiseConfig const& config, std::int64_t tiles, int sm_count) {
  std::int64_t const pairs = sm_count / 2;
  if (pairs == 0 || !may_split_k(config)) return 0;
  std::int64_t const rest = splits_last_wave(config) ? tiles % (2 * pairs) : tiles;
  return rest <= pairs ? rest : 0;
}

}  // namespace epiloq::gemm
