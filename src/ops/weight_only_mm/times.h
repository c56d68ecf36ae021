#pragma once

// What streams take on an H200, for select.cpp: apart from configs.h, as a change there compiles every kernel anew.
//
// Blocks run in waves. Of what a wave takes to read, to multiply and to wait for what is on its way the longest counts
// most, and the others with it (`power`). Fitted on 2026-11-25 to 19 layers by 1 to 8 tokens of bfloat16 in groups of
// 128 (weight-only-streams-sweep.json): what it names took 1.7 % more there than the fastest in the mean, 17 at most;
// fitted to three quarters of those layers, 4 % more on the others. (Before, each row had four numbers of its own for
// each width, fitted to eight layers, on which it was 1 % behind; on the other eleven 8 % with 4 bits and 12 with 8,
// 42 at most.) Two numbers were moved by hand after: of {2, 4, 3, 4} by 4 bits, which the benchmark showed slower than
// the sweep where clocks had settled, and of {1, 16, 3, 2}, which would not have served where it is the fastest.

#include <array>

#include "ops/weight_only_mm/configs.h"

namespace epiloq::ops::weight_only_mm {

// Microseconds of a quarter of an SM for a warp's step of 128 columns, for each of its slabs, for each token, for both.
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
    StreamTime{{1.39, 1}, 0.996, {2, 4}},     StreamTime{{0.689, 0.614}, 1.73, {3, 6}},
    StreamTime{{0.942, 1.26}, 0.991, {1, 1}}, StreamTime{{0.588, 0.593}, 1.64, {2, 3}},
    StreamTime{{0.85, 0.937}, 1.02, {4, 7}},  StreamTime{{1.32, 1.71}, 1.14, {2, 2}},
    StreamTime{{1.4, 1.35}, 0.675, {2, 2}},   StreamTime{{1.18, 1.4}, 0.575, {6, 7}},
};

// A step waits `latency` over how many a warp has on their way, its own one counting `own`; a kernel begins and ends,
// and the blocks of a cluster, and more of them, add up once a wave.
inline constexpr struct {
  double latency = 0.659, own = 0.893, read_rate = 6.29e6, power = 1.22;
  double kernel = 1.27, cluster = 0.964, cluster_block = 0.1;
} kStreamTime;

}  // namespace epiloq::ops::weight_only_mm
