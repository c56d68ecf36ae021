#pragma once

// The launches of weight-only kernels: declared for the tables of dispatch/weight_only_mm, defined in its
// instantiate*.cuh, and instantiated a table row and type at a time in sources that CMake expands from kernels*.cu.in.

#include "kernels/common/w4a16/config.h"
#include "problems/weight_only.h"

namespace epiloq::ops::weight_only_mm {

using Launch = void (*)(Problem const&, int split, int device, Stream);

template <int kRow, DType kX, int kBits, int kGroups, bool kOffsets>
void launch_gemv(Problem const&, int split, int device, Stream);
template <int kRow, DType kX, int kBits, int kGroups, bool kOffsets>
void launch_tiled(Problem const&, int split, int device, Stream);
template <int kRow, DType kX, int kBits, int kGroups>
void launch_decode(Problem const&, int split, int device, Stream);
template <int kRow, DType kX, int kBits, int kGroups>
void launch_wgmma(Problem const&, int split, int device, Stream);

}  // namespace epiloq::ops::weight_only_mm
