#pragma once

// Every kernel that weight_only_mm is compiled for, and the time that each takes. Data: a new one is a row.
//
// Times are microseconds on an H200, bfloat16 in groups of 128, of 4 bits and of 8, fitted to a sweep of ten layers by
// 1 to 384 tokens (2026-11-22, weight-only-ways-sweep.json): what they name took 1 % more than the fastest in geometric
// mean, 13 at most but for one layer by one token (21 %) and a small one (28 %, timed before last tiles had boxes of
// their own); by 96 and 128 tokens, timed afterwards, 0.3 % and 4 at most. On other GPUs only their ratios count.

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
    StreamConfig{4, 8, 2, 1, {0.308, 1.02, 1.83, 0.0341}, {1.46, 0.702, 0.403, 0.0247}},
    StreamConfig{4, 4, 2, 4, {0.514, 1.71, 0.572, 0.0584}, {0.493, 1.41, 0.0527, 0.0321}},
    StreamConfig{4, 4, 3, 3, {0.462, 0.769, 0.787, 0.062}, {0.316, 1.57, 1.89, 0.0932}},
    StreamConfig{2, 16, 2, 1, {1.28, 0.0308, 1.18, 0.00652}, {0.724, 1.5, 0.641, 0.0338}},
    StreamConfig{1, 16, 4, 1, {0.963, 0.0407, 1.27, 0.02}, {1.1, 0.111, 0.524, 0.0885}},
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
    WgmmaConfig{4, 1, 1, 16, false, {0.458, 3.53}, {0.399, 3.17}},
    WgmmaConfig{3, 2, 1, 16, false, {0.295, 3.88}, {0.545, 2.56}},
    WgmmaConfig{2, 2, 1, 16, false, {0.296, 1.9}, {0.439, 0.824}},
    WgmmaConfig{1, 2, 1, 16, false, {0.227, 1.15}, {0.212, 0.813}},
    WgmmaConfig{4, 1, 1, 32, false, {0.615, 2.36}, {0.692, 4}},
    WgmmaConfig{3, 2, 1, 32, false, {0.47, 3.11}, {0.56, 3.51}},
    WgmmaConfig{2, 2, 1, 32, false, {0.321, 1.8}, {0.528, 1.98}},
    WgmmaConfig{1, 3, 1, 32, false, {0.258, 1.25}, {0.311, 1.13}},
    WgmmaConfig{4, 1, 1, 64, false, {0.656, 4.43}, {0.932, 4.04}},
    WgmmaConfig{3, 1, 1, 64, false, {0.547, 3.47}, {0.739, 4.37}},
    WgmmaConfig{2, 2, 1, 64, false, {0.42, 2.65}, {0.532, 3.42}},
    WgmmaConfig{1, 2, 1, 64, false, {0.247, 2.06}, {0.287, 3.27}},
    WgmmaConfig{2, 1, 2, 128, false, {1.08, 10.9}, {1.75, 6.15}},
    WgmmaConfig{1, 2, 1, 128, false, {0.345, 4.41}, {0.428, 6.1}},
    WgmmaConfig{2, 1, 1, 128, true, {0.507, 6.09}, {0.942, 3.17}},
    WgmmaConfig{2, 1, 1, 256, true, {0.752, 14.1}, {1.78, 5.15}},
};
// On SM90, up to so many tokens weights are not rounded.
inline constexpr int kExactTokens = 128;
// A tile takes all tokens up to so many; of more, none is narrower.
inline constexpr int kWideTokens = 64;

// Beside those times: what the blocks of a cluster take to add up, and bytes of weights that memory gives in a
// microsecond.
inline constexpr double kClusterTime = 1.6;
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
