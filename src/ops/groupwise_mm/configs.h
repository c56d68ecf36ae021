#pragma once

// Every tile that groupwise_mm is compiled for, with what a step of it costs. Data: a new tile is one entry.

#include <array>

#include "gemm/config.h"
#include "gemm/k_sharing.h"

namespace epiloq::ops::groupwise_mm {

using gemm::BlockwiseConfig;
using gemm::GroupwiseConfig;

// A tile and the time that all SMs together take for 128 of K of one tile each, in ns, and for what a tile has to do
// besides. H200, 2026-11-21: from times of seven layer shapes at 64 to 4096 tokens, tokens and weights cold, contenders
// in turns at the clocks that the power limit leaves them (benchmarks/results: many-tokens-sweep). The tile whose waves
// cost least serves: it took 0.3 % more than the fastest in the mean, 6 % at most. Tiles of 64 tokens
// were put in order by times at 1 to 64; no others serve so few.
//
// Two blocks may share K (rings.json, `sharing`): a step then takes `shared_ns` (0: never), and their meeting
// `meeting_ns` and more for each token, less where one gives all of its sums ahead of time (given-sums.json).
struct Tile {
  GroupwiseConfig config;
  int step_ns, end_ns = 0, shared_ns = 0;
  int meeting_ns = 300, meeting_token_ns = 8;
};
inline constexpr std::array kTiles{
    Tile{{1, 2, 32}, 135, 0, 135, 200, 1},
    Tile{{1, 2, 48}, 145, 0, 200, 300, 2},
    Tile{{1, 2, 56}, 155, 0, 225, 300, 2},
    Tile{{1, 2, 64}, 160, 0, 240, 300, 2},
    Tile{{2, 1, 64}, 265, 0, 290},
    Tile{{2, 1, 96}, 345},
    Tile{{2, 1, 128}, 405},
    Tile{{2, 1, 192}, 585},
    Tile{{2, 1, 128, 2}, 765},
};
// With one scale a column of B, which costs registers and instructions: guessed, not measured.
inline constexpr std::array kColumnScaleTiles{
    Tile{{1, 2, 32}, 150, 0, 150},
    Tile{{1, 2, 64}, 280, 0, 280},
    Tile{{2, 1, 128}, 600},
};

// With scales of whole rows, for experts and for scaled_mm, timed as above; int8 on 2026-11-22, at 256 to 4096 tokens
// (with scaled_mm's tile for many tokens 0.03 % more than the fastest in the mean; whole-rows-sweep), float8 0.2 %.
// Tiles of 64 tokens are put in order by times at 1 to 64 tokens. int8 needs no sums beside wgmma's, so that a
// warpgroup has the registers for 256 weights: the fewest bytes of shared memory a product, which bound it.
inline constexpr std::array kInt8RowTiles{
    Tile{{1, 2, 32}, 135, 0, 135, 180, 1}, Tile{{1, 2, 48}, 150, 0, 200, 100, 1}, Tile{{1, 2, 56}, 158, 0, 225, 300, 2},
    Tile{{1, 2, 64}, 165, 0, 250, 85, 2},  Tile{{2, 1, 64}, 266, 0, 290},         Tile{{2, 1, 96}, 279, 900},
    Tile{{2, 1, 112}, 299, 1400},          Tile{{2, 1, 128}, 310, 1300},          Tile{{2, 1, 144}, 363, 2000},
    Tile{{2, 1, 192}, 462, 2000},          Tile{{2, 1, 224}, 552, 2500},          Tile{{2, 1, 256}, 620, 2500},
};
inline constexpr std::array kFloat8RowTiles{
    Tile{{1, 2, 32}, 135, 0, 135, 180, 1},
    Tile{{1, 2, 48}, 155, 0, 200, 100, 1},
    Tile{{1, 2, 56}, 163, 0, 225, 300, 2},
    Tile{{1, 2, 64}, 170, 0, 250, 85, 2},
    Tile{{2, 1, 64}, 285, 0, 290},
    Tile{{2, 1, 96}, 320},
    Tile{{2, 1, 128}, 400},
    Tile{{2, 1, 192}, 560},
    Tile{{2, 1, 128, 2}, 750},
};
template <std::size_t kCount>
constexpr bool share_where_they_may(std::array<Tile, kCount> const& tiles) {
  for (Tile const& tile : tiles) {
    if (tile.shared_ns > 0 && !(gemm::may_share_k(tile.config) && tile.end_ns == 0)) return false;
  }
  return true;
}
static_assert(share_where_they_may(kTiles) && share_where_they_may(kColumnScaleTiles) &&
              share_where_they_may(kInt8RowTiles) && share_where_they_may(kFloat8RowTiles));

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
