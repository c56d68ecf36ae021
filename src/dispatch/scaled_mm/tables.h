#pragma once

// Every tile that scaled_mm is compiled for. Data: a new tile is one row here and one rule in rules.h, which is apart
// as a change here compiles every kernel anew.

#include <array>

#include "kernels/common/tile_config.h"

namespace epiloq::ops::scaled_mm {

using gemm::MmaConfig;
using gemm::Schedule;
using gemm::SkinnyConfig;
using gemm::WgmmaConfig;

// SM75: tile, warp, stages. Shapes that public Turing kernels use; seen right (on an H200), never timed on a Turing
// card.
inline constexpr std::array kSm75Tiles{
    MmaConfig{{32, 128, 64}, {32, 64, 64}, 2},
    MmaConfig{{64, 128, 64}, {64, 64, 64}, 2},
    MmaConfig{{128, 128, 64}, {64, 64, 64}, 2},
};

// SM80: tile, warp, stages. H200, 2026-11-20.
inline constexpr std::array kSm80Tiles{
    MmaConfig{{32, 64, 128}, {32, 64, 64}, 5},  MmaConfig{{64, 64, 128}, {32, 64, 64}, 5},
    MmaConfig{{64, 128, 128}, {64, 64, 64}, 3}, MmaConfig{{128, 128, 64}, {64, 64, 64}, 5},
    MmaConfig{{128, 256, 64}, {64, 64, 64}, 3},
};
// int8 outputs, on SM80 and what is newer, are compiled for these rows of the table.
inline constexpr int kInt8OutFirst = 1, kInt8OutRows = 3;

// SM80, few tokens and few weight rows: panels of 16 weight rows a block, tokens,
// warps, unroll. The panel count is chosen at run time. H200, 2026-11-20: best of warps 8 and 16 and unrolls 1 to 6.
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

// SM90: tile, cluster m, cluster n, schedule, swap. H200, 2026-11-22, dependent launch, tokens and weights cold, seven
// layer shapes: with fewer than 128 tokens groupwise_mm's kernel for whole rows, which asks TMA for no tokens that are
// not there, is within 3 % of the best of CUTLASS's 77 tiles or up to a sixth faster; at 128 those are up to 13 %
// faster.
inline constexpr auto kW = Schedule::kWarpSpecialized;
inline constexpr auto kP = Schedule::kPingpong;
inline constexpr auto kC = Schedule::kCooperative;
inline constexpr std::array kSm90Tiles{
    WgmmaConfig{{64, 32, 512}, 1, 1, kW, true},    // 0
    WgmmaConfig{{64, 64, 256}, 1, 1, kW, false},   // 1
    WgmmaConfig{{64, 128, 128}, 2, 1, kP, false},  // 2
    WgmmaConfig{{128, 128, 128}, 2, 1, kP, true},  // 3
    WgmmaConfig{{256, 128, 128}, 2, 1, kC, true},  // 4
};

// SM90, float8: as above. H200, 2026-11-20: the best of 49 tiles on seven layer shapes. Accurate sums of one product
// are groupwise_mm's, which adds up while it multiplies: 7 to 22 % faster at 1024 and 4096 tokens (many-tokens-sweep).
// Fast ones may be those, too.
inline constexpr std::array kSm90Float8Tiles{
    WgmmaConfig{{128, 128, 128}, 1, 1, kC, true},         // 0
    WgmmaConfig{{256, 128, 128}, 1, 2, kC, false, true},  // 1
    WgmmaConfig{{64, 32, 256}, 1, 1, kW, false},          // 2
    WgmmaConfig{{64, 64, 256}, 1, 1, kW, false},          // 3
    WgmmaConfig{{128, 192, 128}, 2, 1, kC, false},        // 4
    WgmmaConfig{{128, 128, 128}, 2, 1, kP, true, true},   // 5
    WgmmaConfig{{128, 192, 128}, 2, 1, kC, false, true},  // 6
};

}  // namespace epiloq::ops::scaled_mm
