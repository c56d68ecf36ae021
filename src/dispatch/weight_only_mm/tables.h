#pragma once

// Every kernel that weight_only_mm is compiled for, as sweeps of more left them; costs.h has what they take. Data: a
// new one is a row.

#include <array>

#include "kernels/common/w4a16/config.h"

namespace epiloq::ops::weight_only_mm {

// Some fill an SM with one block and all of a layer with one wave, others by small blocks that K may share; with 7
// panels 28672 rows are two blocks for each SM. The last row fits the shared memory of every device, and is all that
// SM75 has.
inline constexpr std::array kGemvRows{
    GemvConfig{4, 16, 2, 1, true},  GemvConfig{4, 8, 3, 2, true},  GemvConfig{4, 4, 3, 3, true},
    GemvConfig{4, 4, 2, 4, true},   GemvConfig{7, 4, 3, 1, true},  GemvConfig{7, 4, 2, 2, false},
    GemvConfig{8, 4, 2, 2, false},  GemvConfig{4, 4, 3, 3, false}, GemvConfig{2, 16, 2, 1, false},
    GemvConfig{2, 8, 3, 2, false},  GemvConfig{2, 4, 3, 4, false}, GemvConfig{1, 16, 3, 2, false},
    GemvConfig{1, 16, 2, 2, false}, GemvConfig{1, 4, 2, 2, false},
};

// By tokens, fewest first, and again one that fits everywhere.
inline constexpr std::array kTiledRows{
    TiledConfig{8, 16, 4, 3, 2},  TiledConfig{8, 32, 4, 3, 2}, TiledConfig{8, 64, 4, 3, 1},
    TiledConfig{8, 128, 3, 2, 1}, TiledConfig{4, 32, 2, 2, 2},
};

// By tokens, fewest first. Of 19 shapes of blocks the fastest was 0.3 % ahead of these in the mean of ten layers by 8
// tokens, 0.7 by 16 (H200).
inline constexpr std::array kDecodeRows{
    DecodeConfig{2, 4, 2, 8, 2},  DecodeConfig{4, 2, 2, 8, 2},  DecodeConfig{6, 2, 2, 8, 1},
    DecodeConfig{1, 8, 4, 16, 1}, DecodeConfig{2, 4, 2, 16, 2}, DecodeConfig{2, 2, 4, 16, 2},
    DecodeConfig{6, 2, 2, 16, 1},
};

// Those that multiply exact integers by tokens, fewest first, and by rows; then those that round.
inline constexpr std::array kWgmmaRows{
    WgmmaConfig{4, 1, 1, 32, false},  WgmmaConfig{3, 2, 1, 32, false}, WgmmaConfig{2, 2, 1, 32, false},
    WgmmaConfig{1, 2, 1, 32, false},  WgmmaConfig{4, 1, 1, 64, false}, WgmmaConfig{3, 1, 1, 64, false},
    WgmmaConfig{2, 2, 1, 64, false},  WgmmaConfig{1, 2, 1, 64, false}, WgmmaConfig{2, 1, 2, 128, false},
    WgmmaConfig{1, 2, 1, 128, false}, WgmmaConfig{2, 1, 1, 128, true}, WgmmaConfig{2, 1, 1, 256, true},
};
// On SM90, up to so many tokens weights are not rounded.
inline constexpr int kExactTokens = 128;
// Two tiles at most take up to so many tokens; for more, none is narrower.
inline constexpr int kWideTokens = 64;

// Without wgmma, from here on a dense product, of the weight de-quantised into memory first, is faster. H200,
// 2026-11-20: at 256 tokens the tiled kernel takes 2.4 to 5 times a bf16 product, on seven layer shapes, where
// de-quantising costs as much as one or two; at 64 tokens 0.9 to 2.4 times. Between them this is interpolated.
inline constexpr int kDenseTokens = 192;

}  // namespace epiloq::ops::weight_only_mm
