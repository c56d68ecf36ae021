#pragma once

// What the wgmma kernel and a dense convolution take, in microseconds, for select.cpp: apart from tables.h, as a
// change there compiles every kernel anew.

#include <array>

#include "dispatch/conv2d_weight_only/tables.h"
#include "dispatch/weight_only_mm/costs.h"

namespace epiloq::ops::conv2d_weight_only {

// By fourteen layers at batch 1 (2026-11-22, conv2d-weight-only-sweep.json), with what the blocks of a cluster take to
// add up within: what they name took 4 % more than the fastest in geometric mean, 10 % at most.
inline constexpr std::array<weight_only_mm::TileTimes, kWgmmaRows.size()> kWgmmaTimes{{
    {{0.44, 4.34}},
    {{0.21, 4.06}},
    {{0.33, 3.8}},
}};

// De-quantising into memory, then cuDNN: a call, a weight, a product. The first from layers of ResNet-50 at batch 1 on
// an H200, 2026-11-21: 7.9 to 10.3 us where there is little to multiply; the others are weight_only_mm's.
inline constexpr struct {
  double call = 8, weight = 0.95e-6, product = 3.125e-9;
} kDenseTime;

}  // namespace epiloq::ops::conv2d_weight_only
