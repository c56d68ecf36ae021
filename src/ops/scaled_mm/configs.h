#pragma once

// Every tile that scaled_mm is compiled for, and which problem takes which. Data: a new tile is one row and one rule.

#include <array>
#include <climits>

#include "gemm/config.h"

namespace epiloq::ops::scaled_mm {

using gemm::MmaConfig;
using gemm::Schedule;
using gemm::SkinnyConfig;
using gemm::WgmmaConfig;

// The problems m <= m_max, n <= n_max take row `tile`; rules are tried in order, the first that fits wins. The last
// rule of each list takes everything.
struct Rule {
  int m_max, n_max;
  int tile;
};
inline constexpr int kAny = INT_MAX;

// SM75: tile, warp, stages. Shapes that public Turing kernels use; seen right (on an H200), never timed on a Turing
// card.
inline constexpr std::array kSm75Tiles{
    MmaConfig{{32, 128, 64}, {32, 64, 64}, 2},
    MmaConfig{{64, 128, 64}, {64, 64, 64}, 2},
    MmaConfig{{128, 128, 64}, {64, 64, 64}, 2},
};
inline constexpr std::array kSm75Rules{
    Rule{32, kAny, 0},
    Rule{64, kAny, 1},
    Rule{kAny, kAny, 2},
};

// SM80: tile, warp, stages. H200, 2026-11-20.
inline constexpr std::array kSm80Tiles{
    MmaConfig{{32, 64, 128}, {32, 64, 64}, 5},  MmaConfig{{64, 64, 128}, {32, 64, 64}, 5},
    MmaConfig{{64, 128, 128}, {64, 64, 64}, 3}, MmaConfig{{128, 128, 64}, {64, 64, 64}, 5},
    MmaConfig{{128, 256, 64}, {64, 64, 64}, 3},
};
inline constexpr std::array kSm80Rules{
    Rule{32, kAny, 0},  Rule{64, 12288, 1},  Rule{64, kAny, 2},   Rule{128, 8448, 1},
    Rule{512, kAny, 3}, Rule{kAny, 4608, 3}, Rule{kAny, kAny, 4}, Rule{kAny, kAny, 3},  // where 128x256 does not fit
};

// Batches of products (scaled_bmm) take tiles of the same tables: not the skinny ones, which know one product, nor on
// SM90 those that ask for weights early, by block number. By shape alone, not timed.
inline constexpr std::array kSm80BatchRules{
    Rule{32, kAny, 0}, Rule{64, kAny, 1}, Rule{kAny, 64, 1}, Rule{kAny, kAny, 3}, Rule{kAny, kAny, 0},
};
// int8 outputs, on SM80 and what is newer, are compiled for these rows of the table.
inline constexpr int kInt8OutFirst = 1, kInt8OutRows = 3;
inline constexpr std::array kInt8OutRules{Rule{kAny, 64, 1}, Rule{64, kAny, 2}, Rule{kAny, kAny, 3},
                                          Rule{kAny, kAny, 1}};

// SM80, few tokens and so few weight rows that the tiles above leave SMs idle: slabs of 16 weight rows a block, tokens,
// warps, unroll. The slab count is chosen at run time. H200, 2026-11-20: best of warps 8 and 16 and unrolls 1 to 6.
inline constexpr int kSkinnyMaxN = 6656;
inline constexpr std::array kSkinnyTiles{
    SkinnyConfig{1, 8, 16, 2},  SkinnyConfig{2, 8, 16, 2},  SkinnyConfig{3, 8, 16, 2},  SkinnyConfig{4, 8, 16, 2},
    SkinnyConfig{1, 16, 16, 2}, SkinnyConfig{2, 16, 16, 2}, SkinnyConfig{3, 16, 16, 1}, SkinnyConfig{4, 16, 16, 1},
};

// SM89, float8: tile, warp, stages, fast accumulation. Accurate sums take twice the registers, so smaller warp tiles.
// Seen right (on an H200), never timed on an Ada card.
inline constexpr std::array kSm89Tiles{
    MmaConfig{{64, 128, 128}, {32, 64, 64}, 3},       MmaConfig{{32, 64, 128}, {32, 64, 64}, 5},
    MmaConfig{{128, 128, 64}, {64, 32, 64}, 4},       MmaConfig{{64, 64, 128}, {32, 64, 64}, 4, true},
    MmaConfig{{64, 128, 128}, {64, 64, 64}, 3, true}, MmaConfig{{128, 128, 64}, {64, 64, 64}, 5, true},
};
inline constexpr int kE5M2Row = 0;  // of each float8 table: what e5m2 operands, on either side, are compiled for
inline constexpr std::array kSm89AccurateRules{
    Rule{32, kAny, 1},
    Rule{128, kAny, 0},
    Rule{kAny, kAny, 2},
};
inline constexpr std::array kSm89FastRules{
    Rule{32, kAny, 1},
    Rule{64, kAny, 3},
    Rule{128, kAny, 4},
    Rule{kAny, kAny, 5},
};

// SM90: tile, cluster m, cluster n, schedule, swap, blocks an SM, early bytes. H200, 2026-11-20, dependent launch,
// weights cold: the best of 77 tiles on seven layer shapes. Swizzles and raster orders were level.
inline constexpr auto kW = Schedule::kWarpSpecialized;
inline constexpr auto kP = Schedule::kPingpong;
inline constexpr auto kC = Schedule::kCooperative;
inline constexpr int kEarly = 64 * 1024;
inline constexpr std::array kSm90Tiles{
    WgmmaConfig{{64, 16, 256}, 1, 1, kP, true, 1, kEarly},      // 0: more weight tiles than SMs, so persistent
    WgmmaConfig{{64, 16, 256}, 1, 1, kW, true, 2, kEarly / 2},  // 1
    WgmmaConfig{{64, 16, 256}, 1, 1, kW, true, 1, kEarly},      // 2
    WgmmaConfig{{64, 16, 256}, 1, 2, kW, true},                 // 3: tokens in pairs of tiles share the weights
    WgmmaConfig{{64, 32, 512}, 1, 1, kW, true},                 // 4
    WgmmaConfig{{64, 32, 256}, 1, 1, kP, true, 1, kEarly},      // 5
    WgmmaConfig{{64, 64, 256}, 1, 1, kP, true, 1, kEarly},      // 6
    WgmmaConfig{{64, 64, 256}, 1, 1, kW, false},                // 7
    WgmmaConfig{{64, 32, 256}, 1, 1, kW, false},                // 8
    WgmmaConfig{{64, 64, 256}, 1, 8, kW, false},                // 9: eight blocks share their tokens
    WgmmaConfig{{64, 128, 128}, 2, 1, kP, false},               // 10
    WgmmaConfig{{128, 128, 128}, 1, 1, kP, true},               // 11
    WgmmaConfig{{256, 128, 128}, 2, 1, kC, true},               // 12
};
inline constexpr std::array kSm90Rules{
    // up to 128; more are groupwise_mm's: in one run of three wide layers at 1024 and 4096 tokens it and CUTLASS's tile
    // of 256 x 128 were level (1.00 of its time, 0.97 beside bf16, where two turns differ by up to a fifth)
    Rule{16, 2560, 3}, Rule{16, 4608, 2}, Rule{16, 6656, 1}, Rule{16, 8448, 2},  Rule{16, kAny, 0},
    Rule{32, 4608, 3}, Rule{32, 6656, 9}, Rule{32, 8448, 4}, Rule{32, kAny, 5},  Rule{64, 4608, 8},
    Rule{64, 7168, 9}, Rule{64, 8448, 7}, Rule{64, kAny, 6}, Rule{128, 4608, 7}, Rule{128, kAny, 10},
};

inline constexpr std::array kSm90BatchRules{
    Rule{32, kAny, 4},   Rule{64, kAny, 7},   Rule{kAny, 64, 7},
    Rule{512, kAny, 11}, Rule{kAny, 512, 11}, Rule{kAny, kAny, 12},
};

// SM90, float8: as above. H200, 2026-11-20: the best of 49 tiles on seven layer shapes. Few tokens wait for weights and
// have accurate tiles only, which take 1.05 times as long as int8's; accurate sums of more are groupwise_mm's,
// which adds up while it multiplies: 7 to 22 % faster at 1024 and 4096 tokens (many-tokens-sweep).
inline constexpr std::array kSm90Float8Tiles{
    WgmmaConfig{{128, 128, 128}, 1, 1, kC, true},               // 0
    WgmmaConfig{{256, 128, 128}, 1, 2, kC, false, 1, 0, true},  // 1
    WgmmaConfig{{64, 32, 256}, 1, 1, kP, true, 1, kEarly},      // 2
    WgmmaConfig{{64, 16, 256}, 1, 1, kP, true, 1, kEarly},      // 3
    WgmmaConfig{{64, 16, 256}, 1, 1, kW, true, 2, kEarly / 2},  // 4
    WgmmaConfig{{64, 16, 256}, 1, 1, kW, true, 1, kEarly},      // 5
    WgmmaConfig{{64, 32, 256}, 1, 1, kW, false},                // 6
    WgmmaConfig{{64, 16, 256}, 1, 2, kW, true},                 // 7
    WgmmaConfig{{64, 64, 256}, 1, 8, kW, false},                // 8
    WgmmaConfig{{64, 64, 256}, 1, 1, kW, false},                // 9
    WgmmaConfig{{64, 64, 256}, 1, 1, kP, true, 1, kEarly},      // 10
    WgmmaConfig{{128, 192, 128}, 2, 1, kC, false},              // 11
    WgmmaConfig{{64, 128, 128}, 2, 1, kP, false, 1, 0, true},   // 12
    WgmmaConfig{{128, 128, 128}, 2, 1, kP, true, 1, 0, true},   // 13
    WgmmaConfig{{128, 192, 128}, 2, 1, kC, false, 1, 0, true},  // 14
};
inline constexpr std::array kSm90FewTokensRules{
    // up to 64; fast sums go on from here
    Rule{16, 4608, 5}, Rule{16, 6656, 4}, Rule{16, 8448, 5}, Rule{16, kAny, 3}, Rule{32, 4608, 7},
    Rule{32, 7168, 8}, Rule{32, kAny, 2}, Rule{64, 4608, 6}, Rule{64, 7168, 8}, Rule{64, kAny, 10},
};
inline constexpr std::array kSm90Float8BatchRules{
    Rule{32, kAny, 6},  Rule{64, kAny, 9},  Rule{kAny, 64, 9},
    Rule{kAny, 512, 0}, Rule{512, kAny, 0}, Rule{kAny, kAny, 11},
};
inline constexpr std::array kSm90FastRules{
    Rule{128, 4608, 9},   Rule{128, kAny, 12}, Rule{256, 2560, 9},   Rule{256, 4608, 12},  Rule{256, kAny, 13},
    Rule{kAny, 2560, 14}, Rule{kAny, 4608, 1}, Rule{kAny, 6656, 13}, Rule{kAny, 12288, 1}, Rule{kAny, kAny, 13},
};

}  // namespace epiloq::ops::scaled_mm
