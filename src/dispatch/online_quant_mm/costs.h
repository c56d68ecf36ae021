#pragma once

// What kernels take on SM90, for select.cpp, in nanoseconds at the clock of a Hopper card: apart from tables.h, as a
// change there compiles every kernel anew. What all kernels of a problem take alike (the pass that quantises, a launch)
// is not in them.
//
// Fitted on 2026-11-27 by tools/online_quant_fit.py to what an H100 took for 31 layers by 8 to 4096 tokens of bfloat16
// in blocks of 128 (nvidia-h100's online-quant-sweep.json) and drafts of these kernels an H200 for nine
// (nvidia-h200's online-quant-few-sweep.json); 918 problems. What serves, of what was timed, took 0.4 % more than the
// fastest in the mean, 8 at most.

#include <iterator>

#include "dispatch/online_quant_mm/tables.h"

namespace epiloq::ops::online_quant_mm {

// By mma.sync: of an SM, to multiply a block's tile by a step of 128 of K; of a team, to wait for one; to add up and to
// end. Of what they amount to, and of reading, the longest counts most. By 4 bits and 8.
struct MmaTime {
  double work[2], wait[2], end;
  int resident[2];  // blocks whose registers an SM holds
};
inline constexpr MmaTime kMmaTimes[]{
    MmaTime{{58.8, 34.7}, {462.0, 510.0}, 1860.0, {5, 5}},    MmaTime{{72.0, 18.4}, {605.0, 726.0}, 1720.0, {4, 3}},
    MmaTime{{60.2, 12.6}, {673.0, 769.0}, 1770.0, {3, 3}},    MmaTime{{49.3, 44.1}, {779.0, 781.0}, 1370.0, {3, 3}},
    MmaTime{{207.0, 210.0}, {1150.0, 984.0}, 1870.0, {2, 2}}, MmaTime{{433.0, 464.0}, {1030.0, 985.0}, 998.0, {2, 2}},
    MmaTime{{993.0, 979.0}, {788.0, 786.0}, 2590.0, {1, 1}},  MmaTime{{273.0, 238.0}, {815.0, 794.0}, 724.0, {3, 3}},
};
static_assert(std::size(kMmaTimes) == kTiles.size());

// By wgmma: a block's tile by a step, a row of kSm90Tokens each, by 4 bits and 8.
inline constexpr double kSm90Steps[][2]{
    {373.0, 377.0}, {450.0, 445.0}, {459.0, 470.0}, {503.0, 540.0}, {566.0, 551.0},
};
static_assert(std::size(kSm90Steps) == kSm90Tokens.size());

// The powers of mma.sync's parts, and of a step of wgmma and its reading; what memory gives of what its clock and width
// amount to; what wgmma takes longer to begin; a token of a tile to end, and to send its sums to the blocks of a
// cluster, each of which takes longer; and what sharing a last wave should save at least.
inline constexpr struct {
  double mma_power = 2.33, power = 3.18, read_rate = 1.2;
  double begin = 1290.0, token = 9.08, sent_token = 21.7, split = 185.0, last_wave = 1580.0;
} kSm90Time;
// Behind how many waves the last one is shared: of 270 tiles and problems it took as much off up to nine as times say,
// behind more less, or added.
inline constexpr int kSm90MostWaves = 9;
inline constexpr int kFewTokens = 32;  // tiles of up to twice as many were timed for fewer, too

}  // namespace epiloq::ops::online_quant_mm
