#pragma once

// Every tile that groupwise_mm is compiled for, with what a step of it costs. Data: a new tile is one entry.

#include <array>

#include "gemm/config.h"

namespace epiloq::ops::groupwise_mm {

using gemm::BlockwiseConfig;
using gemm::GroupwiseConfig;

// A tile and the time that all SMs together take for 128 of K of one tile each, in ns. H200, 2026-11-21: from times of
// seven layer shapes at 1 to 4096 tokens, those of 128 and more at the clock that the power limit leaves in long runs
// (short bursts put other tiles first). The tile whose waves cost least serves: it took 0.5 % more than the fastest in
// the mean, 7 % at most.
struct Tile {
  GroupwiseConfig config;
  int step_ns;
};
inline constexpr std::array kTiles{
    Tile{{1, 2, 32}, 165},  Tile{{1, 2, 48}, 195},  Tile{{1, 2, 56}, 205},
    Tile{{1, 2, 64}, 215},  Tile{{2, 1, 64}, 335},  Tile{{2, 1, 96}, 375},
    Tile{{2, 1, 128}, 430}, Tile{{2, 1, 192}, 650}, Tile{{2, 1, 112, 2}, 855},
};
// With one scale a column of B, which costs registers and instructions: guessed, not measured.
inline constexpr std::array kColumnScaleTiles{
    Tile{{1, 2, 32}, 150},
    Tile{{1, 2, 64}, 280},
    Tile{{2, 1, 128}, 600},
};

// With scales of whole rows, of int8 or float8, for experts. Guessed, not timed.
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
