#pragma once

// Cost model of online_quant_mm on SM90, in ns at a Hopper card's clock, fitted by
// tools/kernel_times/online_quant_fit.py. Separate from tables.h, as a change there recompiles every kernel. What all
// candidates share (the quantising kernel, a launch) is left out.

#include <iterator>

#include "dispatch/online_quant_mm/tables.h"

namespace epiloq::ops::online_quant_mm {

// mma.sync, for 4 and 8 bits: an SM's time to multiply a CTA tile by a K step of 128; a K group's latency per step;
// reduction and end. The parts and the memory time combine as a p-norm.
struct MmaTime {
  double work[2], wait[2], end;
  int resident[2];  // CTAs per SM, by registers
};
inline constexpr MmaTime kMmaTimes[]{
    MmaTime{{58.8, 34.7}, {462.0, 510.0}, 1860.0, {5, 5}},    MmaTime{{72.0, 18.4}, {605.0, 726.0}, 1720.0, {4, 3}},
    MmaTime{{60.2, 12.6}, {673.0, 769.0}, 1770.0, {3, 3}},    MmaTime{{49.3, 44.1}, {779.0, 781.0}, 1370.0, {3, 3}},
    MmaTime{{207.0, 210.0}, {1150.0, 984.0}, 1870.0, {2, 2}}, MmaTime{{433.0, 464.0}, {1030.0, 985.0}, 998.0, {2, 2}},
    MmaTime{{993.0, 979.0}, {788.0, 786.0}, 2590.0, {1, 1}},  MmaTime{{273.0, 238.0}, {815.0, 794.0}, 724.0, {3, 3}},
};
static_assert(std::size(kMmaTimes) == kTiles.size());

// WGMMA: a CTA tile by a K step, by rows of kSm90Tokens, for 4 and 8 bits.
inline constexpr double kSm90Steps[][2]{
    {373.0, 377.0}, {450.0, 445.0}, {459.0, 470.0}, {503.0, 540.0}, {566.0, 551.0},
};
static_assert(std::size(kSm90Steps) == kSm90Tokens.size());

// Exponents of the p-norms of mma.sync and of a wgmma step with its loads; effective memory bandwidth; WGMMA's start;
// per token of a tile for the epilogue, and for sending sums within a cluster; per CTA of the cluster; and what
// splitting the last wave must save.
inline constexpr struct {
  double mma_power = 2.33, power = 3.18, read_rate = 1.2;
  double begin = 1290.0, token = 9.08, sent_token = 21.7, split = 185.0, last_wave = 1580.0;
} kSm90Time;
// The last wave is split only behind at most this many others.
inline constexpr int kSm90MostWaves = 9;
inline constexpr int kSmallM = 32;  // below it, tiles of up to 2 * kSmallM tokens are candidates, and were timed

}  // namespace epiloq::ops::online_quant_mm
