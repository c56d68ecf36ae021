#pragma once

// Every tile that groupwise_mm is compiled for, with what a step of it costs. Data: a new tile is one row.

#include <array>

#include "gemm/config.h"

namespace epiloq::ops::groupwise_mm {

using gemm::BlockwiseConfig;
using gemm::GroupwiseConfig;
using gemm::Share;

// A tile and the time that all SMs together take for 128 of K of one tile each, in ns. H200, 2026-11-20: from times of
// seven layer shapes at 1 to 4096 tokens. The tile whose waves cost least serves: in 52 of those 56 cases the fastest
// of 24, or one within 3 % of it; at most 12 % behind in the others (N 28672 at 16 to 64 tokens, 8192 x 8192 at 4096).
struct Tile {
  GroupwiseConfig config;
  int step_ns;
};
inline constexpr std::array kTiles{
    Tile{{1, 2, 32}, 135},
    Tile{{1, 2, 48}, 190},
    Tile{{1, 2, 56}, 220},
    Tile{{1, 2, 64}, 250},
    Tile{{1, 2, 96}, 290},
    Tile{{1, 2, 128}, 340},
    Tile{{2, 1, 64}, 310},
    Tile{{2, 1, 96}, 380},
    Tile{{2, 1, 128}, 450},
    Tile{{2, 1, 160, 2, Share::kWeights}, 570},
    Tile{{2, 1, 192, 2, Share::kWeights}, 650},
};
// With one scale a column of B, which costs registers and instructions: guessed, not measured.
inline constexpr std::array kColumnScaleTiles{
    Tile{{1, 2, 32}, 150},
    Tile{{1, 2, 64}, 280},
    Tile{{2, 1, 128}, 600},
};

// With scales of whole rows, of int8 or float8, for experts. Not timed: the steps of the tables above.
inline constexpr std::array kWholeRowTiles{
    Tile{{1, 2, 32}, 135},
    Tile{{1, 2, 64}, 250},
    Tile{{2, 1, 64}, 310},
    Tile{{2, 1, 128}, 450},
};

// int8 on SM80, float8 on SM89 and newer: warp, warps, one team, stages. For few rows of an expert and for many;
// neither was ever run on a card of those.
inline constexpr std::array kMmaTiles{
    BlockwiseConfig{32, 32, 2, 2, 1, 3},
    BlockwiseConfig{32, 32, 4, 2, 1, 3},
};

}  // namespace epiloq::ops::groupwise_mm
