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
// No row by rule: of groupwise_mm's tiles for whole rows and the TileForMany below, what is expected to take least.
inline constexpr int kWholeRows = -1;

// A tile of CUTLASS's that serves more tokens than it has, where it is expected before any of groupwise_mm's: a step
// and an end as in groupwise_mm's tables. CUTLASS's boxes are whole. Where tokens end within one, TMA fills the rest
// slowly: as if there were so many more rows of tiles.
struct TileForMany {
  int tile;  // its row
  int tokens, weights;
  int step_ns, end_ns, more_rows;
};

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

// Batches of products (scaled_bmm) take tiles of the same tables, but not the skinny ones, which know one product. By
// shape alone, not timed.
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
inline constexpr std::array kSm90Rules{
    Rule{127, kAny, kWholeRows}, Rule{128, 2560, kWholeRows},  Rule{128, 4608, 1},
    Rule{128, kAny, 2},          Rule{kAny, kAny, kWholeRows},
};
// While one of its warpgroups stores, the other multiplies, which counts where tiles are many or K is short (9 to 15 %
// at 28672 x 4096 and 24576 x 1536); two blocks share the tokens. Where tokens end within one, such a tile takes about
// three times as long (217 us at 1030 tokens of 28672 x 4096, 154 at 1024).
inline constexpr std::array kSm90ForMany{TileForMany{3, 128, 128, 342, 500, 2}};

inline constexpr std::array kSm90BatchRules{
    Rule{32, kAny, 0},  Rule{64, kAny, 1},  Rule{kAny, 64, 1},
    Rule{512, kAny, 3}, Rule{kAny, 512, 3}, Rule{kAny, kAny, 4},
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
inline constexpr std::array kSm90Float8BatchRules{
    Rule{32, kAny, 2},  Rule{64, kAny, 3},  Rule{kAny, 64, 3},
    Rule{kAny, 512, 0}, Rule{512, kAny, 0}, Rule{kAny, kAny, 4},
};
// Fast sums, H200, 2026-11-25 (fast-sums.json beside pairs.json): of accurate tiles and these, what is chosen took
// half a percent more than the fastest in the mean, 4 at most. Tiles by rules, whatever their waves, had taken up
// to 1.8 times as long as accurate ones (512 tokens of 2112 x 7168), and a tile of 64 x 128 brought 1 to 4 % by 128
// tokens.
inline constexpr std::array kSm90FastForMany{
    TileForMany{1, 256, 128, 700, 4600, 1},
    TileForMany{5, 128, 128, 400, 100, 1},
    TileForMany{6, 128, 192, 537, 4700, 1},
};

}  // namespace epiloq::ops::scaled_mm
