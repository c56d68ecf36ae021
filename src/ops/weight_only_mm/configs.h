#pragma once

// Every kernel that weight_only_mm is compiled for, and which problem takes which. Data: a new one is a row.

#include <array>

namespace epiloq::ops::weight_only_mm {

// At most `tokens` tokens: `warps` warps take turns at the steps of K, of `slabs` slabs of 16 rows of 4-bit weights, or
// the same bytes of 8-bit ones; each asks `stages` - 1 of its steps ahead. `blocks` have their registers in an SM.
struct StreamConfig {
  int slabs, warps, stages, tokens, blocks;

  constexpr int slabs_of(int bits) const { return slabs * 4 > bits ? slabs * 4 / bits : 1; }
};

// More tokens: a block of `warps` warps of 32 weight rows each, by tiles of `tokens`; steps in shared memory, of 4-bit
// and of 8-bit weights; blocks that an SM's registers hold.
struct TiledConfig {
  int warps, tokens, stages4, stages8, blocks;

  constexpr int rows() const { return 32 * warps; }
  constexpr int stages(int bits) const { return bits == 4 ? stages4 : stages8; }
};

// By tokens and by what a block reads, most first; the last one fits the shared memory of every device, and is all that
// SM75 has.
inline constexpr std::array kStreamRows{
    StreamConfig{4, 8, 3, 8, 2}, StreamConfig{4, 8, 2, 8, 2},  StreamConfig{2, 8, 5, 8, 2}, StreamConfig{2, 8, 2, 8, 3},
    StreamConfig{1, 8, 6, 8, 2}, StreamConfig{2, 8, 2, 16, 2}, StreamConfig{1, 4, 2, 8, 2},
};

// By tokens, fewest first, and again one that fits everywhere.
inline constexpr std::array kTiledRows{
    TiledConfig{8, 16, 4, 3, 2},  TiledConfig{8, 32, 4, 3, 2}, TiledConfig{8, 64, 4, 3, 1},
    TiledConfig{8, 128, 3, 2, 1}, TiledConfig{4, 32, 2, 2, 2},
};

// SM90, more tokens: `teams` warpgroups of `blocks` times 64 weight rows each, by tiles of `tokens`. Tiles are high
// because each reads all tokens from L2, whose bandwidth otherwise ends before memory's; so there are few, and K is
// shared. With many tokens the tensor cores are all that counts, and `rounds` lets them add up everything: a weight is
// rounded to the tokens' type with its scale, as for a dense product, and not its group's sum multiplied.
struct WgmmaConfig {
  int teams, blocks, tokens;
  bool rounds;

  constexpr int rows() const { return 64 * teams * blocks; }
};

// Those that multiply exact integers by tokens, fewest first, then one for weights of few rows; then those that round.
inline constexpr std::array kWgmmaRows{
    WgmmaConfig{4, 1, 16, false},  WgmmaConfig{4, 1, 32, false}, WgmmaConfig{4, 1, 64, false},
    WgmmaConfig{2, 2, 128, false}, WgmmaConfig{2, 1, 64, false}, WgmmaConfig{2, 1, 128, true},
    WgmmaConfig{2, 1, 256, true},
};

// Tokens from which to which the wgmma kernel is taken. None: it has not been run on a GPU.
struct TokenRange {
  int first, last;
};
inline constexpr TokenRange kWgmmaTokens{1, 0};

// Up to so many tokens the streaming kernel is taken.
inline constexpr int kStreamTokens = 8;

// Bytes of weights that a block asks for before the previous kernel has finished.
inline constexpr int kEarlyBytes = 32 * 1024;

// From here on a dense product, of the weight de-quantised into memory first, is faster. H200, 2026-11-20: at 256
// tokens the tiled kernel takes 2.4 to 5 times a bf16 product, on seven layer shapes, where de-quantising costs as much
// as one or two; at 64 tokens 0.9 to 2.4 times. Between them this is interpolated.
inline constexpr int kDenseTokens = 192;

}  // namespace epiloq::ops::weight_only_mm
