#pragma once

// online_quant_mm's tiles, and the rules for architectures without a cost model. A new tile is a row and a rule, and
// for SM90 its costs (costs.h).

#include <array>

#include "dispatch/rules.h"
#include "kernels/common/tile_config.h"

namespace epiloq::ops::online_quant_mm {

using gemm::WarpTileConfig;

inline constexpr std::array kGroups{32, 64, 128};

// SM80: warp tile (tokens, weight rows), warps along each, K groups, stages. Not tuned on SM80.
inline constexpr std::array kTiles{
    WarpTileConfig{16, 16, 1, 1, 4, 4},  // 0: small M: warps stream weights on their own
    WarpTileConfig{16, 32, 1, 1, 4, 4},  // 1
    WarpTileConfig{32, 32, 1, 1, 4, 3},  // 2
    WarpTileConfig{32, 32, 2, 1, 2, 4},  // 3
    WarpTileConfig{32, 64, 2, 1, 2, 3},  // 4
    WarpTileConfig{64, 32, 1, 4, 1, 4},  // 5
    WarpTileConfig{64, 32, 2, 4, 1, 4},  // 6
    WarpTileConfig{32, 32, 2, 2, 1, 4},  // 7: fits every card
};
inline constexpr std::array kRules{
    Rule{8, 8192, 0},   Rule{16, 2560, 0},  Rule{16, kAny, 1},   Rule{32, kAny, 2},
    Rule{64, 8192, 3},  Rule{64, kAny, 4},  Rule{128, 2560, 7},  Rule{128, 4096, 3},
    Rule{256, 8192, 5}, Rule{512, 2560, 5}, Rule{kAny, kAny, 6}, Rule{kAny, kAny, 7},
};

// SM75: one stage in shared memory (sm75/online_quant_mainloop.cuh). Not tuned on SM75.
inline constexpr std::array kSm75Tiles{
    WarpTileConfig{16, 16, 1, 1, 4, 1},  // 0: small M: warps stream weights on their own
    WarpTileConfig{16, 32, 1, 1, 4, 1},  // 1
    WarpTileConfig{32, 32, 1, 1, 4, 1},  // 2
    WarpTileConfig{32, 32, 2, 1, 2, 1},  // 3
    WarpTileConfig{32, 32, 2, 2, 1, 1},  // 4: up to three blocks an SM
    WarpTileConfig{32, 48, 2, 2, 1, 1},  // 5: two, which read fewer bytes a product
};
inline constexpr std::array kSm75Rules{
    Rule{16, 2560, 0}, Rule{16, kAny, 1}, Rule{32, kAny, 2}, Rule{64, kAny, 3}, Rule{256, 2560, 4}, Rule{kAny, kAny, 5},
};

// SM90, quantisation blocks of 128: tokens of a tile with kSm90Rows weight rows. costs.h decides among these and
// kTiles.
inline constexpr int kSm90Group = 128, kSm90Rows = 128;
inline constexpr std::array kSm90Tokens{64, 80, 96, 112, 128};

}  // namespace epiloq::ops::online_quant_mm
