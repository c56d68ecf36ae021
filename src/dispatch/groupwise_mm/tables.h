#pragma once

// groupwise_mm's tiles and their costs. A new tile is a row.

#include <array>

#include "kernels/common/groupwise_split_k.h"
#include "kernels/common/tile_config.h"

namespace epiloq::ops::groupwise_mm {

using gemm::GroupwiseConfig;
using gemm::WarpTileConfig;

// A CTA tile and its cost on an H200, with every SM computing one tile; only ratios matter.
//
// `step_ns`: a K step of 128; `end_ns`: prologue and epilogue. Dispatch takes the tile whose waves cost least
// (docs/kernel_choice.md). Two CTAs may split K of a partial wave (groupwise_split_k.h): a step then takes `split_ns`
// (0: never split), and the reduction `reduction_ns` plus `reduction_token_ns` per token.
struct Tile {
  GroupwiseConfig config;
  int step_ns, end_ns = 0, split_ns = 0;
  int reduction_ns = 300, reduction_token_ns = 8;
};
// Tiles of few tokens and many weights: half as many, whose ends then cost half as much. Measured for experts only, and
// chosen for them only; with scales per row they are also compiled for them only.
constexpr bool is_for_experts(GroupwiseConfig const& config) { return config.m_groups == 1 && config.n > 64; }
// A tile whose last wave may split K: the step costs the same, and the reduction is rounded up so that K is split only
// where that saves much.
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
    Tile{{1, 2, 128}, 330, 400},
};
// B has one scale per column and group, which costs registers and instructions; estimated, not measured.
inline constexpr std::array kColumnScaleTiles{
    Tile{{1, 2, 32}, 150, 600, 150},
    Tile{{1, 2, 64}, 280, 600, 280},
    with_split_last_wave({2, 1, 128}, 600, 1500),
};
// The same for an A with one scale per row: computes D^T (kTransposesD), with the main loop and times of kTiles.
inline constexpr std::array kTransposedTiles{
    with_split_last_wave({2, 1, 128}, 433, 1400),
    with_split_last_wave({3, 1, 128}, 613, 2025),
    Tile{{2, 1, 128, 2}, 834, 1930},
};
template <gemm::Scales kScales>
constexpr auto const& group_tiles() {
  if constexpr (kScales == gemm::Scales::kColumns)
    return kColumnScaleTiles;
  else if constexpr (kScales == gemm::Scales::kColumnsOfWholeRows)
    return kTransposedTiles;
  else
    return kTiles;
}

// Per-row scales, for experts and for scaled_mm. int8 needs no FP32 promotion, so a warpgroup has registers for 256
// columns, which reads the fewest bytes of shared memory per product. The tile for experts stays last (CMakeLists.txt).
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
    Tile{{1, 2, 128}, 340, 400},
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
    Tile{{1, 2, 128}, 350, 400},
};
static_assert(is_for_experts(kInt8RowTiles.back().config) && is_for_experts(kFloat8RowTiles.back().config));
template <std::size_t kCount>
constexpr bool split_where_allowed(std::array<Tile, kCount> const& tiles) {
  for (Tile const& tile : tiles) {
    if (tile.split_ns > 0 && !gemm::may_split_k(tile.config)) return false;
  }
  return true;
}
static_assert(split_where_allowed(kTiles) && split_where_allowed(kColumnScaleTiles) &&
              split_where_allowed(kTransposedTiles) && split_where_allowed(kInt8RowTiles) &&
              split_where_allowed(kFloat8RowTiles));

template <DType kElement>
constexpr GroupwiseConfig row_tile(int row) {
  if constexpr (kElement == DType::kInt8) return kInt8RowTiles[row].config;
  return kFloat8RowTiles[row].config;
}

// int8 on SM80, FP8 on SM89 and newer: warp tile, warps, K groups, stages. One tile for few rows per expert and one for
// many; not tuned on such a card.
inline constexpr std::array kMmaTiles{
    WarpTileConfig{32, 32, 2, 2, 1, 3},
    WarpTileConfig{32, 32, 4, 2, 1, 3},
};

}  // namespace epiloq::ops::groupwise_mm
