#pragma once

// The launches of packed_fp4_mm's WGMMA kernels (SM90): declared for dispatch/grouped_packed_mm, defined in
// sm90/w4a16/fp4_gemm.cuh, and instantiated a table row at a time in sources that CMake expands from
// kernels_wgmma.cu.in.

#include "kernels/launch/grouped_packed_mm.h"

namespace epiloq::ops::grouped_packed_mm {

// By tokens. Weights are multiplied by their scales, which is exact, and the tensor cores accumulate all of K.
inline constexpr std::array kWgmmaRows{
    weight_only_mm::WgmmaConfig{2, 2, 1, 32, true}, weight_only_mm::WgmmaConfig{2, 2, 1, 64, true},
    weight_only_mm::WgmmaConfig{2, 1, 1, 128, true}, weight_only_mm::WgmmaConfig{2, 1, 1, 256, true}};

template <int kRow, DType kX, Format kFormat>
void launch_wgmma(Problem const&, int tiles, int split, int device, Stream);

}  // namespace epiloq::ops::grouped_packed_mm
