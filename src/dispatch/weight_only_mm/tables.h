#pragma once

// weight_only_mm's kernels; costs.h has their cost model. A new kernel is a row.

#include <algorithm>
#include <array>

#include "kernels/common/w4a16/config.h"

namespace epiloq::ops::weight_only_mm {

// GEMV. Some rows fill an SM with one CTA and a layer in one wave; others are small CTAs that may split K. The last row
// fits the shared memory of every device and is all that SM75 has.
inline constexpr std::array kGemvRows{
    GemvConfig{4, 16, 2, 1, true},  GemvConfig{4, 8, 3, 2, true},  GemvConfig{4, 4, 3, 3, true},
    GemvConfig{4, 4, 2, 4, true},   GemvConfig{7, 4, 3, 1, true},  GemvConfig{7, 4, 2, 2, false},
    GemvConfig{8, 4, 2, 2, false},  GemvConfig{4, 4, 3, 3, false}, GemvConfig{2, 16, 2, 1, false},
    GemvConfig{2, 8, 3, 2, false},  GemvConfig{2, 4, 3, 4, false}, GemvConfig{1, 16, 3, 2, false},
    GemvConfig{1, 16, 2, 2, false}, GemvConfig{1, 4, 2, 2, false},
};

// mma.sync GEMM, by tokens; the last row fits every device.
inline constexpr std::array kTiledRows{
    TiledConfig{8, 16, 4, 3, 2},  TiledConfig{8, 32, 4, 3, 2}, TiledConfig{8, 64, 4, 3, 1},
    TiledConfig{8, 128, 3, 2, 1}, TiledConfig{4, 32, 2, 2, 2},
};

// Decode kernel (SM90), by tokens.
inline constexpr std::array kDecodeRows{
    DecodeConfig{2, 4, 2, 8, 2},  DecodeConfig{4, 2, 2, 8, 2},  DecodeConfig{6, 2, 2, 8, 1},
    DecodeConfig{1, 8, 4, 16, 1}, DecodeConfig{2, 4, 2, 16, 2}, DecodeConfig{2, 2, 4, 16, 2},
    DecodeConfig{6, 2, 2, 16, 1},
};

// WGMMA GEMM (SM90), by tokens and rows: exact weights, then rounded ones.
inline constexpr std::array kWgmmaRows{
    WgmmaConfig{4, 1, 1, 32, false},  WgmmaConfig{3, 2, 1, 32, false}, WgmmaConfig{2, 2, 1, 32, false},
    WgmmaConfig{1, 2, 1, 32, false},  WgmmaConfig{4, 1, 1, 64, false}, WgmmaConfig{3, 1, 1, 64, false},
    WgmmaConfig{2, 2, 1, 64, false},  WgmmaConfig{1, 2, 1, 64, false}, WgmmaConfig{2, 1, 2, 128, false},
    WgmmaConfig{1, 2, 1, 128, false}, WgmmaConfig{2, 1, 1, 128, true}, WgmmaConfig{2, 1, 1, 256, true},
};
// Rows of the GEMV and mma.sync tables that are built for 2 and 3 bits, too.
inline constexpr std::array kNarrowGemvRows{10, 13};
inline constexpr std::array kNarrowTiledRows{0, 2, 4};
constexpr bool is_narrow_gemv(int row) { return std::ranges::find(kNarrowGemvRows, row) != kNarrowGemvRows.end(); }
constexpr bool is_narrow_tiled(int row) { return std::ranges::find(kNarrowTiledRows, row) != kNarrowTiledRows.end(); }

// SM90: up to this many tokens weights are not rounded.
inline constexpr int kExactTokens = 128;
// No tile narrower than half of the tokens is tried, nor, above twice this many tokens, one narrower than this.
inline constexpr int kWideTokens = 64;

// Without wgmma: from this many tokens on it is faster to dequantise the weight into memory for a dense product.
inline constexpr int kDenseTokens = 192;

}  // namespace epiloq::ops::weight_only_mm
