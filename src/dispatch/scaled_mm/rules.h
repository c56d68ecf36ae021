#pragma once

// Which problem takes which of scaled_mm's tiles (tables.h). Data.

#include <array>
#include <climits>

namespace epiloq::ops::scaled_mm {

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

inline constexpr std::array kSm75Rules{Rule{32, kAny, 0}, Rule{64, kAny, 1}, Rule{kAny, kAny, 2}};

inline constexpr std::array kSm80Rules{
    Rule{32, kAny, 0},  Rule{64, 12288, 1},  Rule{64, kAny, 2},   Rule{128, 8448, 1},
    Rule{512, kAny, 3}, Rule{kAny, 4608, 3}, Rule{kAny, kAny, 4}, Rule{kAny, kAny, 3},  // where 128x256 does not fit
};
// Of few tokens, so few weight rows that those tiles would leave SMs idle are the skinny kernel's.
inline constexpr int kSkinnyMaxN = 6656;

// Batches of products (scaled_bmm) take tiles of the same tables, but not the skinny ones, which know one product. By
// shape alone, not timed.
inline constexpr std::array kSm80BatchRules{
    Rule{32, kAny, 0}, Rule{64, kAny, 1}, Rule{kAny, 64, 1}, Rule{kAny, kAny, 3}, Rule{kAny, kAny, 0},
};
inline constexpr std::array kInt8OutRules{
    Rule{kAny, 64, 1},
    Rule{64, kAny, 2},
    Rule{kAny, kAny, 3},
    Rule{kAny, kAny, 1},
};

inline constexpr std::array kSm89AccurateRules{Rule{32, kAny, 1}, Rule{128, kAny, 0}, Rule{kAny, kAny, 2}};
inline constexpr std::array kSm89FastRules{
    Rule{32, kAny, 1},
    Rule{64, kAny, 3},
    Rule{128, kAny, 4},
    Rule{kAny, kAny, 5},
};

// int8. At 128 tokens a tile of 64 x 128 takes 1 % more to 8 less than groupwise_mm's where outputs are many, and 15 to
// 39 more than those where they are few (H200, 2026-11-25, ten layers: int8-128-sweep.json).
inline constexpr std::array kSm90Rules{
    Rule{127, kAny, kWholeRows},
    Rule{128, 4608, kWholeRows},
    Rule{128, kAny, 2},
    Rule{kAny, kAny, kWholeRows},
};
// While one of its warpgroups stores, the other multiplies, which counts where tiles are many or K is short (9 to 15 %
// at 28672 x 4096 and 24576 x 1536); two blocks share the tokens. Where tokens end within one, such a tile takes about
// three times as long (217 us at 1030 tokens of 28672 x 4096, 154 at 1024).
inline constexpr std::array kSm90ForMany{TileForMany{3, 128, 128, 342, 500, 2}};

inline constexpr std::array kSm90BatchRules{
    Rule{32, kAny, 0},  Rule{64, kAny, 1},  Rule{kAny, 64, 1},
    Rule{512, kAny, 3}, Rule{kAny, 512, 3}, Rule{kAny, kAny, 4},
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
