#pragma once

// Every kernel that weight_only_mm is compiled for, and the time that each takes. Data: a new one is a row.
//
// Times are microseconds on an H200, bfloat16 in groups of 128, of 4 bits and of 8, fitted to sweeps: by 1 to 128
// tokens of eight layers on 2026-11-23 (weight-only-clusters-sweep.json; what they name took 0.2 % more there with 4
// bits than the fastest in geometric mean, with 8 bits 0.6, and 6 at most), and beyond of ten layers the day before
// (weight-only-ways-sweep.json). The rows are what sweeps of more left. On other GPUs only their ratios count.

#include <array>

namespace epiloq::ops::weight_only_mm {

// cp.async writes eight lanes' 16 bytes each into shared memory at once if they are one line. With rings that began 16
// bytes beside one, 2112 x 7168 of 4 bits by 8 tokens took 6.8 us for 5.1, with stages 64 beside, 4096 x 4096 4.6
// for 4.2.
inline constexpr int kSharedLine = 128;
constexpr int whole_lines(int bytes) { return (bytes + kSharedLine - 1) / kSharedLine * kSharedLine; }

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
    StreamConfig{4, 16, 2, 1, true, {0.0376, 0.677, 1.34, 0.0328}, {0.623, 0.976, 0.255, 0.714}},
    StreamConfig{4, 8, 3, 2, true, {0.0264, 0.414, 1.43, 0.494}, {0.0609, 0.534, 0.872, 0.417}},
    StreamConfig{4, 4, 3, 3, true, {0.127, 0.394, 1.75, 0.458}, {0.118, 0.655, 2.38, 0.567}},
    StreamConfig{4, 4, 2, 4, true, {0.101, 0.84, 1.48, 0.0247}, {0.39, 0.355, 0.143, 0.39}},
    StreamConfig{2, 16, 2, 1, true, {0.318, 0.452, 1.23, 0.542}, {0.129, 0.396, 2.27, 0.419}},
    StreamConfig{8, 4, 2, 2, true, {0.0718, 1.36, 1.58, 0.201}, {0.405, 1, 0.26, 0.329}},
    StreamConfig{4, 12, 2, 1, false, {0.352, 0.812, 1.91, 0.0431}, {0.174, 0.734, 1.07, 0.0755}},
    StreamConfig{8, 8, 2, 1, false, {1.04, 1.8, 2.16, 0.0327}, {0.0638, 0.186, 2.6, 1.01}},
    StreamConfig{8, 4, 2, 2, false, {0.0238, 1.04, 2.02, 0.221}, {0.528, 1.4, 0.344, 0.0788}},
    StreamConfig{4, 4, 3, 3, false, {0.0321, 0.629, 2.92, 0.171}, {0.148, 0.841, 2.58, 0.0417}},
    StreamConfig{2, 16, 2, 1, false, {0.396, 0.0425, 1.46, 0.049}, {0.328, 0.46, 0.843, 0.114}},
    StreamConfig{2, 8, 3, 2, false, {0.213, 0.0937, 1.94, 0.0455}, {0.0878, 0.573, 0.336, 0.603}},
    StreamConfig{2, 4, 3, 4, false, {0.152, 0.0985, 2.18, 0.0399}, {0.0987, 0.597, 1.11, 0.127}},
    StreamConfig{1, 16, 3, 2, false, {0.417, 0.113, 0.91, 0.0704}, {0.369, 0.142, 2.78, 0.174}},
    StreamConfig{1, 16, 2, 2, false, {0.34, 0.05, 1.39, 0.0233}, {0.134, 0.0413, 1.55, 0.254}},
    StreamConfig{1, 4, 2, 2, false, {0.203, 0.0113, 0.247, 0.0365}, {0.171, 0.288, 0.651, 0.336}},
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
    WgmmaConfig{4, 1, 1, 16, false, {0.419, 2.63}, {0.491, 4.3}},
    WgmmaConfig{3, 2, 1, 16, false, {0.33, 2.28}, {0.375, 3.26}},
    WgmmaConfig{2, 2, 1, 16, false, {0.269, 1.66}, {0.3, 2.81}},
    WgmmaConfig{1, 2, 1, 16, false, {0.192, 1.5}, {0.226, 1.19}},
    WgmmaConfig{4, 1, 1, 32, false, {0.585, 2.11}, {0.696, 4.87}},
    WgmmaConfig{3, 2, 1, 32, false, {0.438, 2.88}, {0.393, 3.88}},
    WgmmaConfig{2, 2, 1, 32, false, {0.325, 1.94}, {0.459, 1.69}},
    WgmmaConfig{1, 3, 1, 32, false, {0.228, 3.09}, {0.154, 2.45}},
    WgmmaConfig{4, 1, 1, 64, false, {0.781, 4.6}, {0.94, 5.6}},
    WgmmaConfig{3, 1, 1, 64, false, {0.648, 2.71}, {0.757, 4.69}},
    WgmmaConfig{2, 2, 1, 64, false, {0.377, 4.34}, {0.554, 2.95}},
    WgmmaConfig{1, 2, 1, 64, false, {0.239, 2.99}, {0.339, 1.48}},
    WgmmaConfig{2, 1, 2, 128, false, {1.5, 8.41}, {1.89, 7.94}},
    WgmmaConfig{1, 2, 1, 128, false, {0.392, 3.99}, {0.444, 7.87}},
    WgmmaConfig{2, 1, 1, 128, true, {0.667, 5.24}, {0.829, 6.18}},
    WgmmaConfig{2, 1, 1, 256, true, {1.17, 7.42}, {2.03, 4.82}},
};
// On SM90, up to so many tokens weights are not rounded.
inline constexpr int kExactTokens = 128;
// A tile takes all tokens up to so many; of more, none is narrower.
inline constexpr int kWideTokens = 64;

// Beside those times: what the blocks of a cluster take to add up, streams and wgmma's tiles, which have sums of their
// size and take longer for each block beyond kCrowd; with one way along K their blocks read one another's sums. And
// bytes of weights that memory gives in a microsecond.
inline constexpr int kCrowd = 4;
inline constexpr double kStreamCluster = 0.82;
struct ClusterTime {
  double tile, sum, crowd;
};
inline constexpr ClusterTime kSentSums{0.288, 8.91e-05, 0.087}, kReadSums{1.2, 0.000103, 0.35};
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
