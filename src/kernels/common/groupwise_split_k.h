#pragma once

// Which tiles of the groupwise GEMM two CTAs split along K; host code, for the cost model and the launch.

#include <cstdint>

#include "kernels/common/tile_config.h"

namespace epiloq::gemm {

// Whether a tile's K can be split between the two CTAs of a cluster (sm90/groupwise_split_k.cuh). Narrow tiles exchange
// partial sums through the output staging buffer, and all tiles are split. Wider tiles exchange them through the
// pipeline's stages after the last K step, so that only a CTA's last tile, one of a partial last wave, can be split.
constexpr bool splits_last_wave(GroupwiseConfig const& config) {
  return config.rounds == 1 && config.m_groups > 1 && config.n > 64;
}
constexpr bool may_split_k(GroupwiseConfig const& config) {
  return config.rounds == 1 && (config.n <= 64 || splits_last_wave(config));
}

// How many of a problem's tiles would be split: all, those of the last wave, or none if they outnumber the pairs of
// SMs.
constexpr std::int64_t split_tiles(GroupwiseConfig const& config, std::int64_t tiles, int sm_count) {
  std::int64_t const pairs = sm_count / 2;
  if (pairs == 0 || !may_split_k(config)) return 0;
  std::int64_t const rest = splits_last_wave(config) ? tiles % (2 * pairs) : tiles;
  return rest <= pairs ? rest : 0;
}

}  // namespace epiloq::gemm
