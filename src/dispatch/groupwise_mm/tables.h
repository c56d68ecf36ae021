#pragma once

// Every tile that groupwise_mm is compiled for, with what a step of it costs. Data: a new tile is one entry.

#include <array>

#include "kernels/common/groupwise_split_k.h"
#include "kernels/common/tile_config.h"

namespace epiloq::ops::groupwise_mm {

using gemm::BlockwiseConfig;
using gemm::GroupwiseConfig;

// A tile and the time that all SMs together take for 128 of K of one tile each, in ns, and for what a tile has to do
// besides. H200, 2026-11-25: from times of seven layer shapes at 128 to 4096 tokens, tokens and weights cold, from 1024
// on each contender at the clock that the power limit leaves it alone (benchmarks/results: pairs; int8 in turns, at the
// clock of their mixture, and beside scaled_mm's tile for many tokens: last-waves, whole-rows-sweep). The tile whose
// waves cost least serves: in groups and in whole rows of float8 it took 0.2 % more than the fastest in the mean, 4 at
// most; times of one kernel differ by 3 to 8 there. Only ratios count: they stand so that tiles of 64 tokens keep their
// place, which were put in order by times at 1 to 64, where no others serve; what those take besides is a guess.
//
// Two blocks may share K of what does not fill a wave (groupwise_split_k.h): a step then takes `split_ns` (0: never),
// and their meeting `reduction_ns` and more for each token, less where one gives all of its sums ahead of time
// (rings.json, `sharing`; given-sums.json; last-waves.json).
struct Tile {
  GroupwiseConfig config;
  int step_ns, end_ns = 0, split_ns = 0;
  int reduction_ns = 300, reduction_token_ns = 8;
};
// Those whose last waves may be shared take no longer for a step of them. Their meeting was fitted to 2,000 to 2,600
// ns; with more a wave is not shared where that hardly pays (8192 x 8192 by 128 tokens, where it was 7 % slower).
constexpr Tile with_split_last_wave(GroupwiseConfig config, int step_ns, int end_ns) {
  constexpr int kReductionNs = 3000;
  return {config, step_ns, end_ns, step_ns, kReductionNs, 0};
}
inline constexpr std::array kTiles{
    Tile{{1, 2, 32}, 135, 600, 135, 200, 1},
    Tile{{1, 2, 48}, 145, 600, 200, 300, 2},
    Tile{{1, 2, 56}, 155, 600, 225, 300, 2},
    Tile{{1, 2, 64}, 160, 600, 240, 300, 2},
    Tile{{2, 1, 64}, 291, 1060, 294},
    with_split_last_wave({2, 1, 96}, 350, 2510),
    with_split_last_wave({2, 1, 128}, 433, 1400),
    with_split_last_wave({2, 1, 192}, 603, 3560),
    with_split_last_wave({3, 1, 96}, 534, 870),
    with_split_last_wave({3, 1, 128}, 613, 2025),
    Tile{{2, 1, 128, 2}, 834, 1930},
};
// With one scale a column of B, which costs registers and instructions: guessed, not measured.
inline constexpr std::array kColumnScaleTiles{
    Tile{{1, 2, 32}, 150, 600, 150},
    Tile{{1, 2, 64}, 280, 600, 280},
    with_split_last_wave({2, 1, 128}, 600, 1500),
};

// With scales of whole rows, for experts and for scaled_mm, timed as above: int8 1.7 % more than the fastest in the
// mean. int8 needs no sums beside wgmma's, so that a warpgroup has the registers for 256 weights: the fewest bytes of
// shared memory a product, which bound it.
inline constexpr std::array kInt8RowTiles{
    Tile{{1, 2, 32}, 135, 600, 135, 180, 1},
    Tile{{1, 2, 48}, 150, 600, 200, 100, 1},
    Tile{{1, 2, 56}, 158, 600, 225, 300, 2},
    Tile{{1, 2, 64}, 165, 600, 250, 85, 2},
    Tile{{2, 1, 64}, 238, 650, 280},
    with_split_last_wave({2, 1, 96}, 253, 1790),
    with_split_last_wave({2, 1, 112}, 300, 1570),
    with_split_last_wave({2, 1, 128}, 334, 1410),
    with_split_last_wave({2, 1, 144}, 378, 1980),
    with_split_last_wave({2, 1, 192}, 466, 2420),
    with_split_last_wave({2, 1, 224}, 559, 3180),
    with_split_last_wave({2, 1, 256}, 650, 2680),
};
inline constexpr std::array kFloat8RowTiles{
    Tile{{1, 2, 32}, 135, 600, 135, 180, 1},
    Tile{{1, 2, 48}, 155, 600, 200, 100, 1},
    Tile{{1, 2, 56}, 163, 600, 225, 300, 2},
    Tile{{1, 2, 64}, 170, 600, 250, 85, 2},
    Tile{{2, 1, 64}, 244, 1190, 270},
    with_split_last_wave({2, 1, 96}, 312, 1920),
    with_split_last_wave({2, 1, 128}, 407, 1450),
    with_split_last_wave({2, 1, 192}, 593, 2400),
    with_split_last_wave({3, 1, 96}, 471, 1730),
    Tile{{2, 1, 128, 2}, 783, 2590},
};
template <std::size_t kCount>
constexpr bool split_where_allowed(std::array<Tile, kCount> const& tiles) {
  for (Tile const& tile : tiles) {
    if (tile.split_ns > 0 && !gemm::may_split_k(tile.config)) return false;
  }
  return true;
}
static_assert(split_where_allowed(kTiles) && split_where_allowed(kColumnScaleTiles) &&
              split_where_allowed(kInt8RowTiles) && split_where_allowed(kFloat8RowTiles));

template <DType kElement>
constexpr GroupwiseConfig row_tile(int row) {
  if constexpr (kElement == DType::kInt8) return kInt8RowTiles[row].config;
  return kFloat8RowTiles[row].config;
}

// int8 on SM80, float8 on SM89 and newer: warp, warps, one team, stages. For few rows of an expert and for many;
// neither was ever run on a card of those.
inline constexpr std::array kMmaTiles{
    BlockwiseConfig{32, 32, 2, 2, 1, 3},
    BlockwiseConfig{32, 32, 4, 2, 1, 3},
};

}  // namespace epiloq::ops::groupwise_mm
