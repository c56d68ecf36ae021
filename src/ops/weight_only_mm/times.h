#pragma once

// What kernels take, for select.cpp, in microseconds: apart from configs.h, as a change there compiles every kernel
// anew. All at a Hopper card's clock of SMs; memory gives shares of what a card's clock and width amount to (device.h).
//
// Streams, on an H200. Blocks run in waves. Of what a wave takes to read, to multiply and to wait for what is on its
// way the longest counts most, and the others with it (`power`). Fitted on 2026-11-25 to 19 layers by 1 to 8 tokens of
// bfloat16 in groups of 128 (weight-only-streams-sweep.json): what it names took 1.7 % more there than the fastest in
// the mean, 17 at most; fitted to three quarters of those layers, 4 % more on the others. (Before, each row had four
// numbers of its own for each width, fitted to eight layers, on which it was 1 % behind; on the other eleven 8 % with 4
// bits and 12 with 8, 42 at most.) Three numbers were moved by hand after: of {2, 4, 3, 4} by 4 bits, which the
// benchmark showed slower than the sweep where clocks had settled, of {1, 16, 3, 2}, which would not have served where
// it is the fastest, and of {4, 4, 3, 3} by 4 bits, which with few steps of K takes longer than this has it (24576 x
// 1536).

#include <array>

#include "ops/weight_only_mm/configs.h"

namespace epiloq::ops::weight_only_mm {

// Of a quarter of an SM for a warp's step of 128 columns, for each of its slabs, for each token, for both.
struct StreamStep {
  double step, slab, token, slab_token;
};
// By 4 bits and 8, tokens of 16 bits and digits.
inline constexpr StreamStep kStreamSteps[2][2]{
    {{0.0191, 0.0313, 0.00138, 0.00129}, {0.00723, 0.00985, 0.0153, 0.00712}},
    {{0.0106, 0.0464, 0.00191, 0.000682}, {0.00479, 0.00254, 0.0395, 0.00827}},
};

// Of a row: factors of that, by 4 bits and 8, and of waiting; and blocks whose registers an SM holds.
struct StreamTime {
  double work[2], wait;
  int resident[2];
};
inline constexpr std::array<StreamTime, kStreamRows.size()> kStreamTimes{
    StreamTime{{1.54, 1.36}, 1.11, {1, 1}},   StreamTime{{1.12, 0.863}, 1.7, {2, 2}},
    StreamTime{{0.876, 0.907}, 1.01, {4, 5}}, StreamTime{{0.994, 1.17}, 0.939, {4, 5}},
    StreamTime{{1.39, 1.4}, 0.867, {1, 1}},   StreamTime{{0.997, 1.15}, 1.57, {3, 4}},
    StreamTime{{1.17, 1.36}, 1.17, {1, 1}},   StreamTime{{1.14, 1.03}, 1.11, {2, 4}},
    StreamTime{{1.39, 1}, 0.996, {2, 4}},     StreamTime{{0.9, 0.614}, 1.73, {3, 6}},
    StreamTime{{0.942, 1.26}, 0.991, {1, 1}}, StreamTime{{0.588, 0.593}, 1.64, {2, 3}},
    StreamTime{{0.85, 0.937}, 1.02, {4, 7}},  StreamTime{{1.32, 1.71}, 1.14, {2, 2}},
    StreamTime{{1.4, 1.35}, 0.675, {2, 2}},   StreamTime{{1.18, 1.4}, 0.575, {6, 7}},
};

// A step waits `latency` over how many a warp has on their way, its own one counting `own`; a kernel begins and ends,
// and the blocks of a cluster, and more of them, add up once a wave.
inline constexpr struct {
  double latency = 0.659, own = 0.893, read_rate = 1.28, power = 1.22;
  double kernel = 1.27, cluster = 0.964, cluster_block = 0.1;
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

// The ring's, fitted to sixteen layers by 3 to 16 tokens on an H100
// (nvidia-h100/2026-11-26-weight-only-ring-sweep.json); then those of {6, 2, 2, 8} and {1, 8, 4, 16}, and of {2, 4, 2,
// 8} by 8 bits, moved so that no problem of it is more than a tenth behind, nor 4096 x 14336 by 16 tokens on an H200.
inline constexpr std::array<TileTimes, kRingRows.size()> kRingTimes{
    TileTimes{{0.0647, 1.38}, {0.1, 0.5}},     TileTimes{{0.102, 1.21}, {0.105, 1.07}},
    TileTimes{{0.0929, 1.2}, {0.0864, 1.29}},  TileTimes{{0.055, 1.55}, {0.06, 1.5}},
    TileTimes{{0.0775, 1.45}, {0.0929, 1.13}}, TileTimes{{0.134, 1.63}, {0.164, 1.51}},
    TileTimes{{0.133, 1.55}, {0.101, 1.5}},
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
inline constexpr ClusterTime kRingSums{0.309, 5.12e-05, 0.0864};

// De-quantising into memory, then a product of 16-bit matrices: a call, a weight, a product of two values.
inline constexpr struct {
  double call = 6, weight = 0.95e-6, product = 3.125e-9;
} kDenseTime;

}  // namespace epiloq::ops::weight_only_mm
