#pragma once

// Cost model of conv2d_weight_only, in microseconds. Separate from tables.h, as a change there recompiles every kernel.

#include <array>

#include "dispatch/conv2d_weight_only/tables.h"

namespace epiloq::ops::conv2d_weight_only {

// WGMMA tiles: per 128 columns; start and end of a CTA, reduction over a cluster included.
struct TileTime {
  double step, cta;
};
inline constexpr std::array<TileTime, kWgmmaRows.size()> kWgmmaTimes{{{0.44, 4.34}, {0.21, 4.06}, {0.33, 3.8}}};

// Effective memory bandwidth (relative) and bytes per microsecond of one SM. Load and product time of a step combine as
// a p-norm with exponent max(1, tokens / whole).
inline constexpr struct {
  double rate = 1.03, sm = 5.0e4;
  int whole = 16;  // tokens
} kReading;

// Dequantising into memory, then cuDNN: per call, weight, product.
inline constexpr struct {
  double call = 8, weight = 0.95e-6, product = 3.125e-9;
} kDenseTime;

}  // namespace epiloq::ops::conv2d_weight_only
