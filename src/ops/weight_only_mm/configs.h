#pragma once

// Every kernel that weight_only_mm is compiled for, and the time that each takes. Data: a new one is a row.
//
// Times are microseconds on an H200, bfloat16 in groups of 128, of 4 bits and of 8. Those of tiles of up to 32 tokens
// are fitted to sweeps of ten layers (2026-11-22, weight-only-few-sweep.json): what they name took 0 to 1 % more than
// the fastest in geometric mean with 4 bits, 11 at most, 0 to 5 with 8 bits, 15 at most but for one layer by one token
// (27 %, where 8 tokens took the same kernel less time than one); and the rows are what a sweep of 25 left. Of more
// tokens they are of 2026-11-20 (tools/weight_only_sweep.py), those of 64 by what they gained since less: 0 to 1 %
// behind the fastest, 6 at most. On other GPUs only their ratios count.

#include <array>

namespace epiloq::ops::weight_only_mm {

// At most `tokens` tokens: `warps` warps take turns at the steps of K, of `slabs` slabs of 16 rows of 4-bit weights, or
// the same bytes of 8-bit ones; each asks `stages` - 1 of its steps ahead. `blocks` have their registers in an SM.
struct StreamConfig {
  int slabs, warps, stages, tokens, blocks;
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
    StreamConfig{4, 8, 2, 8, 1, {0.605, 1.08, 2.64, 0.007}, {1.06, 0.146, 0.553, 0.026}},
    StreamConfig{4, 4, 2, 8, 4, {0.302, 1.25, 4.56, 0.00751}, {0.436, 0.715, 1.88, 0.0218}},
    StreamConfig{4, 4, 3, 8, 3, {0.385, 1.23, 2.17, 0.0238}, {0.491, 0.838, 1.38, 0.024}},
    StreamConfig{2, 16, 2, 8, 1, {1.24, 0.0593, 1.2, 0.0336}, {0.986, 0.848, 1.42, 0.0728}},
    StreamConfig{1, 16, 4, 8, 1, {0.712, 0.108, 1.62, 0.105}, {0.792, 0.652, 1.46, 0.236}},
    StreamConfig{2, 16, 2, 16, 1, {0.757, 1.44, 1.8, 0.078}, {0.89, 0.625, 2.46, 0.0505}},
    StreamConfig{1, 4, 2, 8, 2, {0.6, 0.6, 1.0, 0.1}, {0.6, 0.6, 1.0, 0.1}},
};
// Without wgmma, up to so many tokens a streaming kernel is taken.
inline constexpr int kStreamTokens = 8;

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
  struct Time {
    double step, block;  // 128 columns; to begin and to end
  } time4, time8 = time4;

  constexpr int rows() const { return 64 * teams * blocks; }
  constexpr Time const& time(int bits) const { return bits == 8 ? time8 : time4; }
};

// Those that multiply exact integers by tokens, fewest first, and by rows; then those that round.
inline constexpr std::array kWgmmaRows{
    WgmmaConfig{4, 1, 16, false, {0.471, 6.14}, {0.591, 4.53}},
    WgmmaConfig{3, 1, 16, false, {0.489, 3.24}, {0.688, 2.23}},
    WgmmaConfig{2, 1, 16, false, {0.352, 2.83}, {0.325, 3.24}},
    WgmmaConfig{4, 1, 32, false, {0.593, 4.84}, {0.618, 7.76}},
    WgmmaConfig{3, 1, 32, false, {0.61, 2.78}, {0.643, 2.83}},
    WgmmaConfig{2, 1, 32, false, {0.317, 4.26}, {0.399, 3.57}},
    WgmmaConfig{4, 1, 64, false, {0.89, 4.9}},
    WgmmaConfig{2, 1, 64, false, {0.51, 3.9}},
    WgmmaConfig{1, 1, 64, false, {0.45, 3.5}},
    WgmmaConfig{2, 2, 128, false, {1.64, 8.2}},
    WgmmaConfig{2, 1, 128, true, {0.9, 4.3}},
    WgmmaConfig{2, 1, 256, true, {1.47, 8.0}},
};
// On SM90, up to so many tokens weights are not rounded, though rounding would be a little faster from 128 on.
inline constexpr int kExactTokens = 128;

// Up to so many tokens one tile takes them all, and `kClusterTime` is what the blocks of a cluster take to add up,
// which times of more tokens have within.
inline constexpr int kFewTokens = 32;
inline constexpr double kClusterTime = 1.6;

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
