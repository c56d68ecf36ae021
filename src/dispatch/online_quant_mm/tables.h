#pragma once

// Every tile that online_quant_mm is compiled for, and which problem takes which where no times say it. Data: a new
// tile is one row and one rule, and for SM90 its times (costs.h).

#include <array>
#include <climits>

#include "kernels/common/tile_config.h"

namespace epiloq::ops::online_quant_mm {

using gemm::BlockwiseConfig;

inline constexpr std::array kGroups{32, 64, 128};

// The problems m <= m_max, n <= n_max take row `tile`; rules are tried in order, the first that fits wins. The last
// rule takes everything.
struct Rule {
  int m_max, n_max;
  int tile;
};
inline constexpr int kAny = INT_MAX;

// SM80: tokens and weight rows of a warp's tile, warps along each, teams that share K, stages. Reasoned from bytes in
// flight and registers, not yet swept on SM80.
inline constexpr std::array kTiles{
    BlockwiseConfig{16, 16, 1, 1, 4, 4},  // 0: few tokens: warps stream weights on their own
    BlockwiseConfig{16, 32, 1, 1, 4, 4},  // 1
    BlockwiseConfig{32, 32, 1, 1, 4, 3},  // 2
    BlockwiseConfig{32, 32, 2, 1, 2, 4},  // 3
    BlockwiseConfig{32, 64, 2, 1, 2, 3},  // 4
    BlockwiseConfig{64, 32, 1, 4, 1, 4},  // 5
    BlockwiseConfig{64, 32, 2, 4, 1, 4},  // 6
    BlockwiseConfig{32, 32, 2, 2, 1, 4},  // 7: fits every card
};
inline constexpr std::array kRules{
    Rule{8, 8192, 0},   Rule{16, 2560, 0},  Rule{16, kAny, 1},   Rule{32, kAny, 2},
    Rule{64, 8192, 3},  Rule{64, kAny, 4},  Rule{128, 2560, 7},  Rule{128, 4096, 3},
    Rule{256, 8192, 5}, Rule{512, 2560, 5}, Rule{kAny, kAny, 6}, Rule{kAny, kAny, 7},
};

// SM75: one stage in shared memory (sm75/w4a8_mainloop.cuh). Reasoned from a T4's bytes in flight and the 64 bytes a
// clock of its shared memory, never timed on one.
inline constexpr std::array kSm75Tiles{
    BlockwiseConfig{16, 16, 1, 1, 4, 1},  // 0: few tokens: warps stream weights on their own
    BlockwiseConfig{16, 32, 1, 1, 4, 1},  // 1
    BlockwiseConfig{32, 32, 1, 1, 4, 1},  // 2
    BlockwiseConfig{32, 32, 2, 1, 2, 1},  // 3
    BlockwiseConfig{32, 32, 2, 2, 1, 1},  // 4: up to three blocks an SM
    BlockwiseConfig{32, 48, 2, 2, 1, 1},  // 5: two, which read fewer bytes a product
};
inline constexpr std::array kSm75Rules{
    Rule{16, 2560, 0}, Rule{16, kAny, 1}, Rule{32, kAny, 2}, Rule{64, kAny, 3}, Rule{256, 2560, 4}, Rule{kAny, kAny, 5},
};

// SM90, blocks of 128: tokens of a tile of kSm90Rows weight rows. Which of them and of kTiles serves follows from
// costs.h.
inline constexpr int kSm90Group = 128, kSm90Rows = 128;
inline constexpr std::array kSm90Tokens{64, 80, 96, 112, 128};

}  // namespace epiloq::ops::online_quant_mm
