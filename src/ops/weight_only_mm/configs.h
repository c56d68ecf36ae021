#pragma once

// Every kernel that weight_only_mm is compiled for, and which problem takes which. Data: a new one is a row.

#include <array>

namespace epiloq::ops::weight_only_mm {

// At most 8 tokens: each of `warps` warps streams its own steps of K, of `slabs` slabs of 16 rows, straight into
// registers; `stages` steps are in flight.
struct StreamConfig {
  int slabs, warps, stages;
};

// More tokens: a block of row_warps x k_warps warps, 32 weight rows a warp, all tokens of a tile from shared memory.
struct TiledConfig {
  int row_warps, k_warps, tokens, stages;
};

inline constexpr int kStreamTokens = 8;
inline constexpr std::array kStreamRows{
    StreamConfig{4, 8, 3},
    StreamConfig{2, 8, 6},
    StreamConfig{1, 8, 8},
};

// By tokens, fewest first.
inline constexpr std::array kTiledRows{
    TiledConfig{8, 1, 16, 6},
    TiledConfig{8, 1, 32, 5},
    TiledConfig{8, 1, 64, 4},
    TiledConfig{8, 1, 128, 4},
};

// From here on a dense product, of the weight de-quantised into memory first, is faster: the tiled kernel does about
// 0.6 of the dense one's arithmetic, which writes and reads the weight once more. An estimate.
inline constexpr int kDenseTokens = 640;

}  // namespace epiloq::ops::weight_only_mm
