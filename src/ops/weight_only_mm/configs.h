#pragma once

// Every kernel that weight_only_mm is compiled for, and the time that each takes. Data: a new one is a row.
//
// Times are microseconds on an H200, bfloat16 in groups of 128, of 4 bits and of 8, fitted to a sweep of ten layers by
// 1 to 384 tokens (2026-11-22, weight-only-ways-sweep.json): what they name took 0.5 % more there than the fastest in
// geometric mean, 10 at most. (By 192, 196, 384 and more tokens it was timed before last tiles had boxes of their own.)
// The rows are what sweeps of 25 and 23 left. On other GPUs only their ratios count.

#include <array>

namespace epiloq::ops::weight_only_mm {

// At most kStreamTokens tokens: `warps` warps take turns at the steps of K, of `slabs` slabs of 16 rows of 4-bit
// weights, or the same bytes of 8-bit ones; each asks `stages` - 1 of its steps ahead. `blocks` have their registers in
// an SM.
inline constexpr int kStreamTokens = 8;
struct StreamConfig {
  int slabs, warps, stages, blocks;
  // A turn takes `turn` times the blocks that share an SM, and a part more for each token, or `alone` if that is
  // longer; a block takes `block` to begin and to end.
  struct Time {
    double turn, alone, block, token;
  } time4, time8;

  constexpr int slabs_of(int bits) const { return slabs * 4 > bits ? slabs * 4 / bits : 1; }
  constexpr Time const& time(int bits) const { return bits == 8 ? time8 : time4; }
};

// More tokens: a block of `warps` warps of 32 weight rows each, by tiles of `tokens`; steps in shared memory, of 4-bit
// and of 8-bit weights; blocks that an SM's registers hold.
struct TiledConfig {
  int warps, tokens, stages4, stages8, blocks;

  constexpr int rows() const { return 32 * warps; }
  constexpr int stages(int bits) const { return bits == 4 ? stages4 : stages8; }
};

// By what a warp reads, most first. Some fill an SM with one block and all of a layer with one wave, others by small
// blocks that K may share. The last row fits the shared memory of every device, and is all that SM75 has.
inline constexpr std::array kStreamRows{
    StreamConfig{4, 8, 2, 1, {0.27, 1, 1.43, 0.0355}, {1.26, 0.544, 1.46, 0.0245}},
    StreamConfig{4, 4, 2, 4, {0.421, 1.59, 0.392, 0.0975}, {0.497, 1.34, 0.0292, 0.0171}},
    StreamConfig{4, 4, 3, 3, {0.452, 0.921, 0.455, 0.0614}, {0.203, 1.45, 1.76, 0.0959}},
    StreamConfig{2, 16, 2, 1, {1.22, 0.0779, 1.09, 0.0102}, {0.294, 1.33, 0.752, 0.0183}},
    StreamConfig{1, 16, 4, 1, {0.942, 0.0232, 1.12, 0.0195}, {1.25, 0.122, 0.655, 0.0255}},
    StreamConfig{1, 4, 2, 2, {0.6, 0.6, 1.0, 0.1}, {0.6, 0.6, 1.0, 0.1}},
};

// By tokens, fewest first, and again one that fits everywhere.
inline constexpr std::array kTiledRows{
    TiledConfig{8, 16, 4, 3, 2},  TiledConfig{8, 32, 4, 3, 2}, TiledConfig{8, 64, 4, 3, 1},
    TiledConfig{8, 128, 3, 2, 1}, TiledConfig{4, 32, 2, 2, 2},
};

// SM90, more tokens: `teams` warpgroups of `blocks` times 64 weight rows each, by tiles of `tokens`; and that `ways`
// times, each way taking every `ways`-th step of K. Tiles are high because each reads all tokens from L2, whose
// bandwidth otherwise ends before memory's; so there are few, and K is shared. With many tokens the tensor cores are
// all that counts, and `rounds` lets them add up everything: a weight is rounded to the tokens' type with its scale, as
// for a dense product, and not its group's sum multiplied.
struct WgmmaConfig {
  int teams, ways, blocks, tokens;
  bool rounds;
  struct Time {
    double step, block;  // 128 columns, or longer if memory takes longer; to begin and to end
  } time4, time8 = time4;

  constexpr int warpgroups() const { return teams * ways; }
  constexpr int rows() const { return 64 * teams * blocks; }
  constexpr Time const& time(int bits) const { return bits == 8 ? time8 : time4; }
};

// Those that multiply exact integers by tokens, fewest first, and by rows; then those that round.
inline constexpr std::array kWgmmaRows{
    WgmmaConfig{4, 1, 1, 16, false, {0.405, 3.34}, {0.464, 1.8}},
    WgmmaConfig{3, 2, 1, 16, false, {0.325, 3.35}, {0.502, 1.6}},
    WgmmaConfig{2, 2, 1, 16, false, {0.264, 2.39}, {0.36, 1.76}},
    WgmmaConfig{1, 2, 1, 16, false, {0.239, 0.585}, {0.202, 0.912}},
    WgmmaConfig{4, 1, 1, 32, false, {0.596, 3.01}, {0.716, 3.37}},
    WgmmaConfig{3, 2, 1, 32, false, {0.453, 3.26}, {0.466, 3.34}},
    WgmmaConfig{2, 2, 1, 32, false, {0.334, 2.81}, {0.534, 1.22}},
    WgmmaConfig{1, 3, 1, 32, false, {0.272, 1.39}, {0.311, 0.568}},
    WgmmaConfig{4, 1, 1, 64, false, {0.656, 5.84}, {0.914, 5.49}},
    WgmmaConfig{3, 1, 1, 64, false, {0.564, 3.65}, {0.769, 4.06}},
    WgmmaConfig{2, 2, 1, 64, false, {0.387, 2.77}, {0.547, 2.32}},
    WgmmaConfig{1, 2, 1, 64, false, {0.274, 1.43}, {0.35, 1.04}},
    WgmmaConfig{2, 1, 2, 128, false, {1.38, 7.81}, {1.9, 5.29}},
    WgmmaConfig{1, 2, 1, 128, false, {0.344, 4.18}, {0.42, 6.57}},
    WgmmaConfig{2, 1, 1, 128, true, {0.568, 6.53}, {0.911, 3.86}},
    WgmmaConfig{2, 1, 1, 256, true, {0.752, 16.4}, {1.81, 4.77}},
};
// On SM90, up to so many tokens weights are not rounded.
inline constexpr int kExactTokens = 128;
// A tile takes all tokens up to so many; of more, none is narrower.
inline constexpr int kWideTokens = 64;

// Beside those times: what the blocks of a cluster take to add up, streams and wgmma's tiles, which have sums of their
// size; and bytes of weights that memory gives in a microsecond.
inline constexpr struct {
  double stream = 1.71, tile = 1.2, sum = 0.000103;
} kClusterTime;
inline constexpr double kReadRate = 4.0e6;

// De-quantising into memory, then a product of 16-bit matrices: a call, a weight, a product of two values.
inline constexpr struct {
  double call = 6, weight = 0.95e-6, product = 3.125e-9;
} kDenseTime;

// Bytes of weights that a block asks for before the previous kernel has finished.
inline constexpr int kEarlyBytes = 32 * 1024;

// Without wgmma, from here on a dense product, of the weight de-quantised into memory first, is faster. H200,
// 2026-11-20: at 256 tokens the tiled kernel takes 2.4 to 5 times a bf16 product, on seven layer shapes, where
// de-quantising costs as much as one or two; at 64 tokens 0.9 to 2.4 times. Between them this is interpolated.
inline constexpr int kDenseTokens = 192;

}  // namespace epiloq::ops::weight_only_mm
