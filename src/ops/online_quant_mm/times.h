#pragma once

// What kernels take on SM90, for select.cpp, in nanoseconds at the clock of a Hopper card: apart from configs.h, as a
// change there compiles every kernel anew. What all kernels of a problem take alike (the pass that quantises, a launch)
// is not in them.
//
// Fitted on 2026-11-26 to what an H100 and an H200 took for 31 layers by 8 to 4096 tokens of bfloat16 in blocks of 128
// (online-quant-sweep.json and online-quant-few-sweep.json; 1,238 problems), of which tools/online_quant_fit.py tells:
// what they name, of what was timed, took 0.6 % more than the fastest in the mean, 12 at most; on layers that were left
// out of a fit 0.4 to 1.3. The tool finds 0.45 in the mean, but one more problem that is over 10 behind.

#include <iterator>

#include "ops/online_quant_mm/configs.h"

namespace epiloq::ops::online_quant_mm {

// By mma.sync: of an SM, to multiply a block's tile by a step of 128 of K; of a team, to wait for one; to add up and to
// end. Of what they amount to, and of reading, the longest counts most. By 4 bits and 8.
struct MmaTime {
  double work[2], wait[2], end;
  int resident[2];  // blocks whose registers an SM holds
};
inline constexpr MmaTime kMmaTimes[]{
    MmaTime{{60.8, 28.8}, {572.0, 599.0}, 2040.0, {5, 5}},   MmaTime{{74.3, 21.5}, {662.0, 793.0}, 2100.0, {4, 3}},
    MmaTime{{54.7, 22.7}, {856.0, 866.0}, 2080.0, {3, 3}},   MmaTime{{59.3, 59.3}, {855.0, 823.0}, 1650.0, {3, 3}},
    MmaTime{{354.0, 303.0}, {870.0, 784.0}, 1970.0, {2, 2}}, MmaTime{{503.0, 465.0}, {910.0, 887.0}, 2000.0, {2, 2}},
    MmaTime{{905.0, 915.0}, {737.0, 748.0}, 1590.0, {1, 1}}, MmaTime{{272.0, 200.0}, {798.0, 802.0}, 2000.0, {3, 3}},
};
static_assert(std::size(kMmaTimes) == kTiles.size());

// By wgmma: a block's tile by a step, a row of kSm90Tokens each, by 4 bits and 8.
inline constexpr double kSm90Steps[][2]{
    {468.0, 459.0}, {529.0, 548.0}, {571.0, 589.0}, {635.0, 644.0}, {695.0, 698.0},
};
static_assert(std::size(kSm90Steps) == kSm90Tokens.size());

// The powers of mma.sync's parts, and of a step of wgmma and its reading; what memory gives of what its clock and width
// amount to; what wgmma takes longer to begin; a token of a tile to end, and to send its sums to the blocks of a
// cluster, each of which takes longer; and what sharing a last wave should save at least.
inline constexpr struct {
  double mma_power = 1.7, power = 2.34, read_rate = 1.05;
  double begin = 1040.0, token = 13.4, sent_token = 33.0, split = 198.0, last_wave = 1870.0;
} kSm90Time;
// Behind how many waves the last one is shared: of 270 tiles and problems it took as much off up to nine as times say,
// behind more less, or added.
inline constexpr int kSm90MostWaves = 9;
inline constexpr int kFewTokens = 32;  // tiles of up to twice as many were timed for fewer, too

}  // namespace epiloq::ops::online_quant_mm
