#pragma once

// From a row of the WGMMA table to the launch, for one type, bit width and group size.

#include "dispatch/weight_only_mm/tables.h"
#include "kernels/sm90/w4a16/w4a16_gemm.cuh"
#include "kernels/sm90/w4a16/w4a16_launch.cuh"

namespace epiloq::ops::weight_only_mm {

template <int kRow, DType kX, int kBits, int kGroups>
void launch_wgmma(Problem const& p, int split, int device, Stream stream) {
  constexpr WgmmaConfig kConfig = kWgmmaRows[kRow];
  using C = Wgmma<CudaType<kX>, kBits, kGroups, kConfig.m_groups, kConfig.k_groups, kConfig.blocks, kConfig.tokens,
                  kConfig.rounds>;
  launch_matrix_tiles<C>(&wgmma_kernel<C>, kConfig, p, split, device, stream);
}

}  // namespace epiloq::ops::weight_only_mm
