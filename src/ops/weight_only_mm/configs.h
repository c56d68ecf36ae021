#pragma once

// Every kernel that weight_only_mm is compiled for, and the time that each takes. Data: a new one is a row.
//
// Times are microseconds on an H200, bfloat16 in groups of 128, of 4 bits and of 8, fitted to sweeps of ten layers on
// 2026-11-22: by 1 to 8 tokens (weight-only-lines-sweep.json; what they name took 0.6 % more there than the fastest in
// geometric mean, 7 at most), by 16 to 64 (weight-only-digits-sweep.json, 0.4 % and 5), and beyond
// (weight-only-ways-sweep.json, before weights were asked for early; by 192, 196, 384 and more tokens also before last
// tiles had boxes of their own). The rows are what sweeps of more left. On
// other GPUs only their ratios count.

#include <array>

namespace epiloq::ops::weight_only_mm {

// At most kStreamTokens tokens: `warps` warps take turns at the steps of K, of `slabs` slabs of 16 rows of 4-bit
// weights, or the same bytes of 8-bit ones; each asks `stages` - 1 of its steps ahead. `blocks` have their registers in
// an SM. With `digits` tokens are multiplied as integers, kDigitTokens at most.
inline constexpr int kStreamTokens = 8, kDigitTokens = 2;
inline constexpr int kDigitBytes = 512;  // of a token and 128 columns
struct StreamConfig {
  int slabs, warps, stages, blocks;
  bool digits;
  // A turn takes `turn` times the blocks that share an SM, and a part more for each token, or `alone` if that is
  // longer; a block takes `block` to begin and to end. Turns and what memory takes for all weights add up as the sides
  // of a right angle do.
  struct Time {
    double turn, alone, block, token;
  } time4, time8;

  constexpr int tokens() const { return digits ? kDigitTokens : kStreamTokens; }
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
    StreamConfig{4, 16, 2, 1, true, {0.03, 0.861, 1.82, 0.0253}, {0.367, 0.629, 1.53, 0.0101}},
    StreamConfig{4, 8, 3, 2, true, {0.0307, 0.65, 1.8, 0.38}, {0.0823, 0.68, 1.13, 0.395}},
    StreamConfig{4, 4, 3, 3, true, {0.132, 0.59, 1.48, 0.4}, {0.151, 0.546, 1.38, 0.206}},
    StreamConfig{4, 4, 2, 4, true, {0.0887, 0.796, 1.45, 0.0183}, {0.145, 0.476, 1.29, 0.106}},
    StreamConfig{2, 16, 2, 1, true, {0.379, 0.169, 1.51, 0.339}, {0.0695, 0.974, 0.572, 0.372}},
    StreamConfig{8, 4, 2, 2, true, {0.0615, 1.05, 1, 0.209}, {0.438, 0.871, 0.245, 0.13}},
    StreamConfig{4, 12, 2, 1, false, {0.318, 0.825, 2.01, 0.0413}, {0.173, 0.27, 2.17, 0.185}},
    StreamConfig{8, 8, 2, 1, false, {1.07, 1.72, 1.62, 0.0209}, {0.381, 0.151, 1.96, 0.0605}},
    StreamConfig{8, 4, 2, 2, false, {0.0334, 1.34, 1.61, 0.396}, {0.503, 0.877, 1.32, 0.0156}},
    StreamConfig{4, 4, 3, 3, false, {0.0996, 0.68, 2.08, 0.275}, {0.167, 0.511, 1.62, 0.0442}},
    StreamConfig{2, 16, 2, 1, false, {0.258, 0.0336, 2.2, 0.0837}, {0.166, 0.292, 1.61, 0.4}},
    StreamConfig{1, 4, 2, 2, false, {0.242, 0.0116, 0.723, 0.0517}, {0.185, 0.449, 0.688, 0.0827}},
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
    WgmmaConfig{4, 1, 1, 16, false, {0.619, 0.9}, {0.491, 2.69}},
    WgmmaConfig{3, 2, 1, 16, false, {0.387, 2.28}, {0.375, 2.25}},
    WgmmaConfig{2, 2, 1, 16, false, {0.309, 1.71}, {0.3, 2.69}},
    WgmmaConfig{1, 2, 1, 16, false, {0.21, 0.728}, {0.214, 0.822}},
    WgmmaConfig{4, 1, 1, 32, false, {0.641, 1.46}, {0.5, 3.7}},
    WgmmaConfig{3, 2, 1, 32, false, {0.46, 2.7}, {0.38, 3.32}},
    WgmmaConfig{2, 2, 1, 32, false, {0.336, 1.51}, {0.307, 2.24}},
    WgmmaConfig{1, 3, 1, 32, false, {0.258, 1.15}, {0.223, 1.73}},
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
// size and take longer for each block beyond kCrowd; and bytes of weights that memory gives in a microsecond.
inline constexpr int kCrowd = 4;
inline constexpr struct {
  double stream = 1.03, tile = 1.2, sum = 0.000103, crowd = 0.35;
} kClusterTime;
inline constexpr struct {
  double stream = 4.8e6, tile = 4.0e6;
} kReadRate;

// De-quantising into memory, then a product of 16-bit matrices: a call, a weight, a product of two values.
inline constexpr struct {
  double call = 6, weight = 0.95e-6, product = 3.125e-9;
} kDenseTime;

// Without wgmma, from here on a dense product, of the weight de-quantised into memory first, is faster. H200,
// 2026-11-20: at 256 tokens the tiled kernel takes 2.4 to 5 times a bf16 product, on seven layer shapes, where
// de-quantising costs as much as one or two; at 64 tokens 0.9 to 2.4 times. Between them this is interpolated.
inline constexpr int kDenseTokens = 192;

}  // namespace epiloq::ops::weight_only_mm
