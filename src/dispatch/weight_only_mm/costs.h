#pragma once

// What kernels take, for select.cpp, in microseconds: apart from tables.h, as a change there compiles every kernel
// anew. All at a Hopper card's clock of SMs; memory gives shares of what a card's clock and width amount to (device.h).
//
// Streams run in waves of blocks. Of what a wave takes to read, to multiply and to wait for what is on its way the
// longest counts most, and the others with it (`power`); then warps' sums are added up. Without those sums 24576 x 1536
// by 4 tokens (three steps a warp) was predicted 1 to 2 us too fast on an H100 and an H200, and 21 % behind.
//
// Fitted on 2026-11-26, and those of wgmma on 2026-11-27, to what both took for 34 layers by 1 to 1024 tokens of
// bfloat16 in groups of 128 or by channel, in the sweeps that tools/weight_only_fit.py names (940 problems): of the
// kernels that a sweep has, what they name took 0.9 % more than the fastest in the mean, 10 at most but for one of 13
// (4 bits, 8192 x 8192 by 192). Of streams fitted to three quarters of the layers it was 2 to 4 % more on the others,
// if what was not measured is counted as 40.

#include <array>

#include "dispatch/weight_only_mm/tables.h"

namespace epiloq::ops::weight_only_mm {

// Of a quarter of an SM for a warp's step of 128 columns, for each of its panels, for each token, for both.
struct GemvStep {
  double step, panel, token, panel_token;
};
// By 4 bits and 8, tokens of 16 bits and digits.
inline constexpr GemvStep kGemvSteps[2][2]{
    {{0.0113, 0.0614, 0.00209, 0.000366}, {0.00763, 0.0199, 0.0136, 0.00594}},
    {{0.0116, 0.0815, 0.000926, 0.000593}, {0.00362, 0.00236, 0.0625, 0.0109}},
};

// Of a row: factors of that, by 4 bits and 8, and of waiting; and blocks whose registers an SM holds.
struct GemvTime {
  double work[2], wait;
  int resident[2];
};
inline constexpr std::array<GemvTime, kGemvRows.size()> kGemvTimes{
    GemvTime{{1.87, 1.56}, 0.309, {1, 1}},  GemvTime{{0.973, 0.49}, 2.07, {2, 2}},
    GemvTime{{1.45, 1.06}, 1.12, {4, 5}},   GemvTime{{1.14, 1.43}, 1.17, {4, 5}},
    GemvTime{{1.26, 1.28}, 1.75, {3, 4}},   GemvTime{{0.873, 0.91}, 1.46, {2, 4}},
    GemvTime{{1.07, 0.72}, 1.61, {2, 4}},   GemvTime{{0.941, 1.26}, 1.44, {3, 6}},
    GemvTime{{1.14, 1.56}, 0.54, {1, 1}},   GemvTime{{0.703, 0.791}, 1.69, {2, 3}},
    GemvTime{{0.937, 1.18}, 0.948, {4, 7}}, GemvTime{{1.28, 1.32}, 1.27, {2, 2}},
    GemvTime{{0.803, 1.07}, 1.02, {2, 2}},  GemvTime{{0.56, 0.965}, 1.12, {6, 7}},
};

// A step waits `latency` over how many a warp has on their way, its own one counting `own`; each panel of a warp's sums
// takes `sum` of an SM; a kernel begins and ends, and the blocks of a cluster, and more of them, add up once a wave.
inline constexpr struct {
  double latency = 0.902, own = 0.849, read_rate = 1.08, power = 1.95, sum = 0.0124;
  double kernel = 1.15, cluster = 0.686, cluster_block = 0.0168;
} kGemvTime;

// Tiles of wgmma, of 4 bits and of 8, a row of kWgmmaRows each.
struct TileTimes {
  struct Time {
    double step, block;  // to multiply by 128 columns; to begin and to end
  } of4, of8 = of4;

  constexpr Time const& of(int bits) const { return bits == 8 ? of8 : of4; }
};
inline constexpr std::array<TileTimes, kWgmmaRows.size()> kWgmmaTimes{
    TileTimes{{0.555, 1.68}, {0.434, 1.87}}, TileTimes{{0.343, 2.05}, {0.411, 1.29}},
    TileTimes{{0.24, 1.99}, {0.316, 1.43}},  TileTimes{{0.208, 1.05}, {0.168, 1.2}},
    TileTimes{{0.799, 2.43}, {0.708, 2.53}}, TileTimes{{0.703, 1.15}, {0.552, 2.19}},
    TileTimes{{0.43, 2.38}, {0.367, 3.39}},  TileTimes{{0.273, 1.36}, {0.305, 1.35}},
    TileTimes{{1.28, 5.9}, {1.19, 6.28}},    TileTimes{{0.435, 3.26}, {0.406, 4.66}},
    TileTimes{{0.645, 3.72}, {0.592, 4.31}}, TileTimes{{1.04, 10.2}, {1.11, 8.67}},
};

// By many tokens a card comes to its power limit, and its clock goes down: microseconds that 10^9 products take there,
// by rows of kWgmmaRows. Of that and of the time at full clock the longer one counts most.
inline constexpr std::array<double, kWgmmaRows.size()> kWgmmaProducts{
    2.81, 5.88, 3.64, 2.85, 2.84, 2.15, 2.99, 2.7, 3.06, 2.38, 2.44, 2.1,
};
inline constexpr double kLimitExponent = 5.3;

// And the ring's, of kDecodeRows.
inline constexpr std::array<TileTimes, kDecodeRows.size()> kDecodeTimes{
    TileTimes{{0.0588, 1.35}, {0.0622, 0.648}}, TileTimes{{0.0877, 1.35}, {0.0962, 0.929}},
    TileTimes{{0.0938, 1.18}, {0.0592, 1.1}},   TileTimes{{0.0275, 2.13}, {0.0371, 1.53}},
    TileTimes{{0.0451, 1.92}, {0.0779, 0.741}}, TileTimes{{0.104, 2.43}, {0.124, 1.61}},
    TileTimes{{0.105, 2.1}, {0.0766, 1.23}},
};

// What memory gives to all SMs, and bytes a microsecond to one SM, however few there are. Of a step's reading and its
// products the longer one counts most, and the more so the more tokens there are: of up to 16 both count whole, of
// twice as many their squares are added up, then their fourth powers and so on.
inline constexpr struct {
  double rate = 1.03, sm = 5.0e4;
  int whole = 16;  // tokens
} kReading;

// What the blocks of a cluster take to add up sums of their tile's size, longer for each block beyond kCrowd: behind
// their rings, or in them (`lends_ring`).
inline constexpr int kCrowd = 3;
struct ClusterTime {
  double tile, sum, crowd;
};
inline constexpr ClusterTime kSentSums{0.0155, 8.99e-05, 0.135}, kLentSums{1.6, 8.48e-05, 0.00302};
inline constexpr ClusterTime kDecodeSums{0.383, 5.62e-05, 0.0423};

// De-quantising into memory, then a product of 16-bit matrices: a call, a weight, a product of two values.
inline constexpr struct {
  double call = 6, weight = 0.95e-6, product = 3.125e-9;
} kDenseTime;

}  // namespace epiloq::ops::weight_only_mm
