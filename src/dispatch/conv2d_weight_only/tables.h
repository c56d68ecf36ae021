#pragma once

// conv2d_weight_only's tiles. A new tile is a row.

#include <array>

#include "kernels/common/w4a16/config.h"

namespace epiloq::ops::conv2d_weight_only {

// mma.sync, by bytes read per CTA, most first; output pixels are the tokens. The last row is SM75's alone. Not tuned on
// a GPU.
inline constexpr std::array kRows{
    weight_only_mm::TiledConfig{4, 64, 4, 3, 2},
    weight_only_mm::TiledConfig{4, 32, 4, 3, 2},
    weight_only_mm::TiledConfig{4, 32, 2, 2, 2},
};
inline constexpr int kSm75Row = static_cast<int>(kRows.size()) - 1;

// SM90: weight_only_mm's WGMMA kernel with lower tiles, as a layer has few output channels.
inline constexpr std::array kWgmmaRows{
    weight_only_mm::WgmmaConfig{2, 1, 1, 64, false},
    weight_only_mm::WgmmaConfig{1, 2, 1, 64, false},
    weight_only_mm::WgmmaConfig{1, 1, 1, 64, false},
};

// Without wgmma: from this many output pixels on a dense convolution should be faster. Interpolated, not measured.
inline constexpr int kDensePixels = 512;

}  // namespace epiloq::ops::conv2d_weight_only
