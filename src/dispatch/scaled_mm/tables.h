#pragma once

// scaled_mm's tiles. A new tile is a row here and a rule in rules.h, which is separate because a change here recompiles
// every kernel.

#include <array>

#include "kernels/common/tile_config.h"

namespace epiloq::ops::scaled_mm {

using gemm::CutlassMmaConfig;
using gemm::CutlassWgmmaConfig;
using gemm::Schedule;
using gemm::SkinnyConfig;

// SM75: tile, warp tile, stages. Correct on an H200; not tuned on a Turing card.
inline constexpr std::array kSm75Tiles{
    CutlassMmaConfig{{32, 128, 64}, {32, 64, 64}, 2},
    CutlassMmaConfig{{64, 128, 64}, {64, 64, 64}, 2},
    CutlassMmaConfig{{128, 128, 64}, {64, 64, 64}, 2},
};

// SM80: tile, warp tile, stages. Tuned on an H200.
inline constexpr std::array kSm80Tiles{
    CutlassMmaConfig{{32, 64, 128}, {32, 64, 64}, 5},  CutlassMmaConfig{{64, 64, 128}, {32, 64, 64}, 5},
    CutlassMmaConfig{{64, 128, 128}, {64, 64, 64}, 3}, CutlassMmaConfig{{128, 128, 64}, {64, 64, 64}, 5},
    CutlassMmaConfig{{128, 256, 64}, {64, 64, 64}, 3},
};
// Rows compiled for int8 outputs, on SM80 and newer.
inline constexpr int kInt8OutFirst = 1, kInt8OutRows = 3;

// SM80 skinny kernel: panels of 16 weight rows per CTA, tokens, warps, unroll. Tuned on an H200.
inline constexpr std::array kSkinnyTiles{
    SkinnyConfig{1, 8, 16, 2},  SkinnyConfig{2, 8, 16, 2},  SkinnyConfig{3, 8, 16, 2},  SkinnyConfig{4, 8, 16, 2},
    SkinnyConfig{1, 16, 16, 2}, SkinnyConfig{2, 16, 16, 2}, SkinnyConfig{3, 16, 16, 1}, SkinnyConfig{4, 16, 16, 1},
};

// SM89 FP8: tile, warp tile, stages, fast accumulation. Accurate accumulation needs twice the registers, so smaller
// warp tiles. Correct on an H200; not tuned on an Ada card.
inline constexpr std::array kSm89Tiles{
    CutlassMmaConfig{{64, 128, 128}, {32, 64, 64}, 3},       CutlassMmaConfig{{32, 64, 128}, {32, 64, 64}, 5},
    CutlassMmaConfig{{128, 128, 64}, {64, 32, 64}, 4},       CutlassMmaConfig{{64, 64, 128}, {32, 64, 64}, 4, true},
    CutlassMmaConfig{{64, 128, 128}, {64, 64, 64}, 3, true}, CutlassMmaConfig{{128, 128, 64}, {64, 64, 64}, 5, true},
};
inline constexpr int kE5M2Row = 0;  // of each FP8 table: compiled for e5m2 operands on either side

// SM90: tile, cluster m, cluster n, schedule, swap. Tuned on an H200. Below 128 tokens the groupwise GEMM with per-row
// scales is as fast or faster, as it loads only rows that exist.
inline constexpr auto kW = Schedule::kWarpSpecialized;
inline constexpr auto kP = Schedule::kPingpong;
inline constexpr auto kC = Schedule::kCooperative;
inline constexpr std::array kSm90Tiles{
    CutlassWgmmaConfig{{64, 32, 512}, 1, 1, kW, true},    // 0
    CutlassWgmmaConfig{{64, 64, 256}, 1, 1, kW, false},   // 1
    CutlassWgmmaConfig{{64, 128, 128}, 2, 1, kP, false},  // 2
    CutlassWgmmaConfig{{128, 128, 128}, 2, 1, kP, true},  // 3
    CutlassWgmmaConfig{{256, 128, 128}, 2, 1, kC, true},  // 4
};

// SM90 FP8, as above. Accurate accumulation of a single product uses groupwise_mm's kernel, which promotes while it
// multiplies; fast accumulation may, too.
inline constexpr std::array kSm90Float8Tiles{
    CutlassWgmmaConfig{{128, 128, 128}, 1, 1, kC, true},         // 0
    CutlassWgmmaConfig{{256, 128, 128}, 1, 2, kC, false, true},  // 1
    CutlassWgmmaConfig{{64, 32, 256}, 1, 1, kW, false},          // 2
    CutlassWgmmaConfig{{64, 64, 256}, 1, 1, kW, false},          // 3
    CutlassWgmmaConfig{{128, 192, 128}, 2, 1, kC, false},        // 4
    CutlassWgmmaConfig{{128, 128, 128}, 2, 1, kP, true, true},   // 5
    CutlassWgmmaConfig{{128, 192, 128}, 2, 1, kC, false, true},  // 6
};

}  // namespace epiloq::ops::scaled_mm
