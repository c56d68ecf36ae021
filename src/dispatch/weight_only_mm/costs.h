#pragma once

// Cost model of weight_only_mm, in microseconds at a Hopper card's clock; memory bandwidth is relative to what clock
// and bus width give (device.h). Fitted by tools/kernel_times/weight_only_fit.py. Separate from tables.h, as a change
// there recompiles every kernel.
//
// A GEMV runs in waves of CTAs. The time of a wave is the p-norm (`power`) of its memory, arithmetic and latency times,
// plus the reduction over warps.

#include <array>

#include "dispatch/weight_only_mm/tables.h"

namespace epiloq::ops::weight_only_mm {

// Cost of one 128-wide K step per warp (µs, of a quarter of an SM): base, per panel, per token, per panel and token.
struct GemvStep {
  double step, panel, token, panel_token;
};
// By bits (4, 8) and arithmetic (16-bit tokens, integer tokens).
inline constexpr GemvStep kGemvSteps[2][2]{
    {{0.0113, 0.0614, 0.00209, 0.000366}, {0.00763, 0.0199, 0.0136, 0.00594}},
    {{0.0116, 0.0815, 0.000926, 0.000593}, {0.00362, 0.00236, 0.0625, 0.0109}},
};

// Per row: factors of that cost by bits, of the latency, and resident CTAs per SM by registers.
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

// A step's latency is `latency` divided by the steps in flight (the current one counts `own`); `sum` is the reduction
// per panel and warp, of an SM; then a kernel's start and end, and the reduction over a cluster, once per wave.
inline constexpr struct {
  double latency = 0.902, own = 0.849, read_rate = 1.08, power = 1.95, sum = 0.0124;
  double kernel = 1.15, cluster = 0.686, cluster_block = 0.0168;
} kGemvTime;

// WGMMA tiles by bits, by rows of kWgmmaRows.
struct TileTimes {
  struct Time {
    double step, block;  // per 128 columns; start and end of a CTA
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

// With many tokens a card reaches its power limit and lowers its clock: microseconds per 10^9 products there, by rows
// of kWgmmaRows, combined with the time at full clock as a p-norm.
inline constexpr std::array<double, kWgmmaRows.size()> kWgmmaProducts{
    2.81, 5.88, 3.64, 2.85, 2.84, 2.15, 2.99, 2.7, 3.06, 2.38, 2.44, 2.1,
};
inline constexpr double kLimitExponent = 5.3;

// The decode kernel, by rows of kDecodeRows.
inline constexpr std::array<TileTimes, kDecodeRows.size()> kDecodeTimes{
    TileTimes{{0.0588, 1.35}, {0.0622, 0.648}}, TileTimes{{0.0877, 1.35}, {0.0962, 0.929}},
    TileTimes{{0.0938, 1.18}, {0.0592, 1.1}},   TileTimes{{0.0275, 2.13}, {0.0371, 1.53}},
    TileTimes{{0.0451, 1.92}, {0.0779, 0.741}}, TileTimes{{0.104, 2.43}, {0.124, 1.61}},
    TileTimes{{0.105, 2.1}, {0.0766, 1.23}},
};

// Effective memory bandwidth (relative) and bytes per microsecond of one SM. Load and product time of a step combine as
// a p-norm with exponent max(1, tokens / whole).
inline constexpr struct {
  double rate = 1.03, sm = 5.0e4;
  int whole = 16;  // tokens
} kReading;

// Reduction over a cluster: per tile, per sum, and per CTA beyond kCrowd; through a buffer behind the stages or through
// the stages (`lends_ring`).
inline constexpr int kCrowd = 3;
struct ClusterTime {
  double tile, sum, crowd;
};
inline constexpr ClusterTime kSentSums{0.0155, 8.99e-05, 0.135}, kLentSums{1.6, 8.48e-05, 0.00302};
inline constexpr ClusterTime kDecodeSums{0.383, 5.62e-05, 0.0423};

// Dequantising into memory, then a 16-bit GEMM: per call, weight, product.
inline constexpr struct {
  double call = 6, weight = 0.95e-6, product = 3.125e-9;
} kDenseTime;

}  // namespace epiloq::ops::weight_only_mm
