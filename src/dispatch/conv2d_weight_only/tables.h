#pragma once

// Every tile that conv2d_weight_only is compiled for. Data: a new one is a row.

#include <array>

#include "kernels/common/w4a16/config.h"

namespace epiloq::ops::conv2d_weight_only {

// By what a block reads, most first, output pixels being weight_only_mm's tokens; the last one is SM75's and nobody
// else's. Chosen by reasoning, not yet by measurement.
inline constexpr std::array kRows{
    weight_only_mm::TiledConfig{4, 64, 4, 3, 2},
    weight_only_mm::TiledConfig{4, 32, 4, 3, 2},
    weight_only_mm::TiledConfig{4, 32, 2, 2, 2},
};
inline constexpr int kSm75Row = static_cast<int>(kRows.size()) - 1;

// SM90: weight_only_mm's wgmma kernel, lower than there, as a layer has few output channels and blocks are to fill the
// SMs.
inline constexpr std::array kWgmmaRows{
    weight_only_mm::WgmmaConfig{2, 1, 1, 64, false},
    weight_only_mm::WgmmaConfig{1, 2, 1, 64, false},
    weight_only_mm::WgmmaConfig{1, 1, 1, 64, false},
};

// Without wgmma, from so many output pixels on a dense convolution should be faster: interpolated from weight_only_mm's
// measurements, as a convolution has more columns to de-quantise. Not yet measured.
inline constexpr int kDensePixels = 512;

}  // namespace epiloq::ops::conv2d_weight_only
