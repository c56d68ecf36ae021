#pragma once

// From a row of the decode table to the launch, for one type, bit width and group size.

#include "dispatch/weight_only_mm/tables.h"
#include "kernels/sm90/w4a16/w4a16_decode_tma.cuh"
#include "kernels/sm90/w4a16/w4a16_launch.cuh"

namespace epiloq::ops::weight_only_mm {

template <int kRow, DType kX, int kBits, int kGroups>
void launch_decode(Problem const& p, int split, int device, Stream stream) {
  constexpr DecodeConfig kConfig = kDecodeRows[kRow];
  using C = Decode<CudaType<kX>, kBits, kGroups, kConfig.m_groups, kConfig.k_groups, kConfig.panels, kConfig.tokens,
                   kConfig.blocks>;
  launch_matrix_tiles<C>(&decode_kernel<C>, kConfig, p, split, device, stream);
}

}  // namespace epiloq::ops::weight_only_mm
