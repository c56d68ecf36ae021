#pragma once

// Rules that assign problems to scaled_mm's tiles (tables.h).

#include <array>

#include "dispatch/rules.h"

namespace epiloq::ops::scaled_mm {

// No rule but the cost model: the cheapest of groupwise_mm's tiles for per-row scales and of the LargeMTiles below.
inline constexpr int kByCost = -1;

// A CUTLASS tile that competes with groupwise_mm's tiles for more tokens than it has: step and end costs as in
// groupwise_mm's tables. CUTLASS loads whole boxes; TMA zero-fills a partial one slowly, as if there were `more_rows`
// more rows of tiles.
struct LargeMTile {
  int tile;  // its row
  int tokens, weights;
  int step_ns, end_ns, more_rows;
};

inline constexpr std::array kSm75Rules{Rule{32, kAny, 0}, Rule{64, kAny, 1}, Rule{kAny, kAny, 2}};

inline constexpr std::array kSm80Rules{
    Rule{32, kAny, 0},  Rule{64, 12288, 1},  Rule{64, kAny, 2},   Rule{128, 8448, 1},
    Rule{512, kAny, 3}, Rule{kAny, 4608, 3}, Rule{kAny, kAny, 4}, Rule{kAny, kAny, 3},  // if 128x256 does not fit
};
// The skinny kernel is used for small M with so few weight rows that those tiles would leave SMs idle.
inline constexpr int kSkinnyMaxN = 6656;

// Batched products (scaled_bmm) take the same tiles but not the skinny kernel. By shape alone, not tuned.
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

// int8. At exactly 128 tokens a CUTLASS tile of 64 x 128 is faster for wide outputs.
inline constexpr std::array kSm90Rules{
    Rule{127, kAny, kByCost},
    Rule{128, 4608, kByCost},
    Rule{128, kAny, 2},
    Rule{kAny, kAny, kByCost},
};
// Ping-pong overlaps one warpgroup's stores with the other's products, which counts if tiles are many or K is short;
// two CTAs share the tokens. A tile with a partial row of tokens takes about three times as long.
inline constexpr std::array kSm90LargeMTiles{LargeMTile{3, 128, 128, 342, 500, 2}};

inline constexpr std::array kSm90BatchRules{
    Rule{32, kAny, 0},  Rule{64, kAny, 1},  Rule{kAny, 64, 1},
    Rule{512, kAny, 3}, Rule{kAny, 512, 3}, Rule{kAny, kAny, 4},
};
inline constexpr std::array kSm90Float8BatchRules{
    Rule{32, kAny, 2},  Rule{64, kAny, 3},  Rule{kAny, 64, 3},
    Rule{kAny, 512, 0}, Rule{512, kAny, 0}, Rule{kAny, kAny, 4},
};

// Fast accumulation.
inline constexpr std::array kSm90FastLargeMTiles{
    LargeMTile{1, 256, 128, 700, 4600, 1},
    LargeMTile{5, 128, 128, 400, 100, 1},
    LargeMTile{6, 128, 192, 537, 4700, 1},
};

}  // namespace epiloq::ops::scaled_mm
