#pragma once

// Cost model of conv2d_weight_only, in microseconds. Separate from tables.h, as a change there recompiles every kernel.

#include <array>

#include "dispatch/conv2d_weight_only/tables.h"
#include "dispatch/weight_only_mm/costs.h"

namespace epiloq::ops::conv2d_weight_only {

// WGMMA tiles, reduction over a cluster included.
inline constexpr std::array<weight_only_mm::TileTimes, kWgmmaRows.size()> kWgmmaTimes{{
    {{0.44, 4.34}},
    {{0.21, 4.06}},
    {{0.33, 3.8}},
}};

// Dequantising into memory, then cuDNN: per call, weight, product.
inline constexpr struct {
  double call = 8, weight = 0.95e-6, product = 3.125e-9;
} kDenseTime;

}  // namespace epiloq::ops::conv2d_weight_only
