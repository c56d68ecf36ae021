#pragma once

// The launches of w4a8_mm: declared for dispatch/w4a8_mm, defined in sm90/w4a16/byte_tokens.cuh, and instantiated a
// table row at a time in sources that CMake expands from kernels.cu.in.

#include <array>

#include "kernels/common/w4a16/config.h"
#include "problems/w4a8_mm.h"

namespace epiloq::ops::w4a8_mm {

// WGMMA tiles (SM90), by tokens and rows.
inline constexpr std::array kRows{
    weight_only_mm::WgmmaConfig{2, 2, 1, 64, false},  weight_only_mm::WgmmaConfig{1, 2, 1, 64, false},
    weight_only_mm::WgmmaConfig{2, 1, 2, 128, false}, weight_only_mm::WgmmaConfig{1, 2, 1, 128, false},
    weight_only_mm::WgmmaConfig{2, 1, 1, 128, false},
};

using Launch = void (*)(Problem const&, int split, int device, Stream);

template <int kRow, DType kOut, int kGroups>
void launch_wgmma(Problem const&, int split, int device, Stream);

// Writes x_q's permuted tokens, columns past K as zeros.
void launch_permute(Problem const& problem, int device, Stream stream);

}  // namespace epiloq::ops::w4a8_mm
