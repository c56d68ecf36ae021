#pragma once

// What kernels take, for select.cpp, in microseconds: apart from configs.h, as a change there compiles every kernel
// anew. All at a Hopper card's clock of SMs; memory gives shares of what a card's clock and width amount to (device.h).
//
// Streams run in waves of blocks. Of what a wave takes to read, to multiply and to wait for what is on its way the
// longest counts most, and the others with it (`power`); then warps' sums are added up. Their times and the ring's were
// fitted together on 2026-11-26, to what an H100 and an H200 took for 19 layers by 1 to 16 tokens of bfloat16 in groups
// of 128 or by channel (the sweeps nvidia-h200/2026-11-25-weight-only-streams, 2026-11-26-weight-only-starts and -ring,
// nvidia-h100/2026-11-25-weight-only-choice and 2026-11-26-weight-only-ring; 446 problems): what they name took 1.1 %
// more there than the fastest in the mean, 10 at most; fitted to three quarters of the layers, 2 to 4 % more on the
// others, if what was not measured is counted as 40. Without the sums of warps, 24576 x 1536 by 4 tokens (three steps a
// warp) was predicted 1 to 2 us too fast on both cards, and 21 % behind.

#include <array>

#include "ops/weight_only_mm/configs.h"

namespace epiloq::ops::weight_only_mm {

// Of a quarter of an SM for a warp's step of 128 columns, for each of its slabs, for each token, for both.
struct StreamStep {
  double step, slab, token, slab_token;
};
// By 4 bits and 8, tokens of 16 bits and digits.
inline constexpr StreamStep kStreamSteps[2][2]{
    {{0.0109, 0.0435, 0.00259, 0.000678}, {0.00721, 0.0111, 0.0175, 0.00831}},
    {{0.0123, 0.0762, 0.000742, 0.000437}, {0.00452, 0.00232, 0.056, 0.00907}},
};

// Of a row: factors of that, by 4 bits and 8, and of waiting; and blocks whose registers an SM holds.
struct StreamTime {
  double work[2], wait;
  int resident[2];
};
inline constexpr std::array<StreamTime, kStreamRows.size()> kStreamTimes{
    StreamTime{{1.59, 1.25}, 0.651, {1, 1}},  StreamTime{{0.864, 0.572}, 1.82, {2, 2}},
    StreamTime{{1.33, 1.09}, 1.03, {4, 5}},   StreamTime{{0.986, 1.49}, 1.04, {4, 5}},
    StreamTime{{1.59, 1.87}, 0.671, {1, 1}},  StreamTime{{1.09, 1.23}, 1.61, {3, 4}},
    StreamTime{{0.896, 0.882}, 1.35, {1, 1}}, StreamTime{{1.05, 0.868}, 1.3, {2, 4}},
    StreamTime{{1.21, 0.67}, 1.46, {2, 4}},   StreamTime{{1.08, 1.22}, 1.34, {3, 6}},
    StreamTime{{1.16, 1.36}, 0.701, {1, 1}},  StreamTime{{0.892, 0.832}, 1.37, {2, 3}},
    StreamTime{{1.12, 1.16}, 0.828, {4, 7}},  StreamTime{{1.4, 1.34}, 1.17, {2, 2}},
    StreamTime{{0.813, 1.31}, 0.934, {2, 2}}, StreamTime{{0.727, 0.931}, 0.987, {6, 7}},
};

// A step waits `latency` over how many a warp has on their way, its own one counting `own`; each slab of a warp's sums
// takes `sum` of an SM; a kernel begins and ends, and the blocks of a cluster, and more of them, add up once a wave.
inline constexpr struct {
  double latency = 0.9, own = 0.761, read_rate = 1.12, power = 1.74, sum = 0.0157;
  double kernel = 1.1, cluster = 0.664, cluster_block = 0.0133;
} kStreamTime;

// Tiles of wgmma, by tokens of bfloat16 in groups of 128, of 4 bits and of 8, a row of kWgmmaRows each, fitted to
// sweeps: of 32 tokens to sixteen layers on an H100 (nvidia-h100/2026-11-26-weight-only-starts-sweep.json), of
// more to those by 48 and 64 tokens and to ten layers by 96 and more on an H200 (weight-only-clusters-sweep.json,
// 2026-11-23, and weight-only-ways-sweep.json, the day before). Layers that were left out of the fit were 0.8 % behind
// their fastest by 32 tokens of 4 bits.
struct TileTimes {
  struct Time {
    double step, block;  // to multiply by 128 columns; to begin and to end
  } of4, of8 = of4;

  constexpr Time const& of(int bits) const { return bits == 8 ? of8 : of4; }
};
inline constexpr std::array<TileTimes, kWgmmaRows.size()> kWgmmaTimes{
    TileTimes{{0.492, 2.15}, {0.471, 2.937}}, TileTimes{{0.383, 2.293}, {0.323, 2.764}},
    TileTimes{{0.24, 1.778}, {0.353, 1.631}}, TileTimes{{0.176, 1.522}, {0.175, 1.618}},
    TileTimes{{0.738, 4.47}, {0.809, 5.62}},  TileTimes{{0.64, 2.65}, {0.621, 4.42}},
    TileTimes{{0.381, 4.01}, {0.52, 2.97}},   TileTimes{{0.233, 2.9}, {0.324, 1.5}},
    TileTimes{{1.42, 8.38}, {1.88, 7.68}},    TileTimes{{0.383, 4.1}, {0.445, 7.96}},
    TileTimes{{0.67, 5.32}, {0.704, 6.08}},   TileTimes{{1.14, 7.18}, {1.65, 4.67}},
};

// The ring's, fitted with the streams'.
inline constexpr std::array<TileTimes, kRingRows.size()> kRingTimes{
    TileTimes{{0.0651, 1.26}, {0.0634, 0.554}}, TileTimes{{0.09, 1.4}, {0.0861, 0.91}},
    TileTimes{{0.0959, 1.2}, {0.059, 0.986}},   TileTimes{{0.0286, 2.08}, {0.0381, 1.54}},
    TileTimes{{0.0458, 1.88}, {0.079, 0.743}},  TileTimes{{0.113, 2.25}, {0.133, 1.47}},
    TileTimes{{0.111, 1.96}, {0.0786, 1.21}},
};

// What memory gives to all SMs, and bytes a microsecond to one SM, however few there are. Of a step's reading and its
// products the longer one counts most, and the more so the more tokens there are: of up to 16 both count whole, of
// twice as many their squares are added up, then their fourth powers and so on.
inline constexpr struct {
  double rate = 1.03, sm = 5.0e4;
  int whole = 16;  // tokens
} kReading;

// What the blocks of a cluster take to add up sums of their tile's size, longer for each block beyond kCrowd; some read
// one another's sums (`sends_sums`).
inline constexpr int kCrowd = 4;
struct ClusterTime {
  double tile, sum, crowd;
};
inline constexpr ClusterTime kSentSums{0.288, 8.91e-05, 0.087}, kReadSums{1.2, 0.000103, 0.35};
inline constexpr ClusterTime kRingSums{0.404, 6.98e-05, 0.0433};

// De-quantising into memory, then a product of 16-bit matrices: a call, a weight, a product of two values.
inline constexpr struct {
  double call = 6, weight = 0.95e-6, product = 3.125e-9;
} kDenseTime;

}  // namespace epiloq::ops::weight_only_mm
