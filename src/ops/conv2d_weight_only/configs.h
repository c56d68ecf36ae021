#pragma once

// Every tile that conv2d_weight_only is compiled for. Data: a new one is a row.

#include <array>

#include "ops/weight_only_mm/configs.h"

namespace epiloq::ops::conv2d_weight_only {

// By what a block reads, most first, output pixels being weight_only_mm's tokens; the last one is SM75's and nobody
// else's. Chosen by reasoning, not yet by measurement.
inline constexpr std::array kRows{
    weight_only_mm::TiledConfig{4, 64, 4, 3, 2},
    weight_only_mm::TiledConfig{4, 32, 4, 3, 2},
    weight_only_mm::TiledConfig{4, 32, 2, 2, 2},
};
inline constexpr int kSm75Row = static_cast<int>(kRows.size()) - 1;

// From so many output pixels on a dense convolution, of the weight de-quantised into memory first, should be faster:
// interpolated from weight_only_mm's measurements, as a convolution has more columns to de-quantise. Not yet measured.
inline constexpr int kDensePixels = 512;

}  // namespace epiloq::ops::conv2d_weight_only
