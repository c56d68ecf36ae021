#pragma once

// A row of the ring table, for one type, width and group size, from the problem to the launch.

#include "dispatch/weight_only_mm/tables.h"
#include "kernels/sm90/w4a16/w4a16_decode_tma.cuh"
#include "kernels/sm90/w4a16/w4a16_launch.cuh"

namespace epiloq::ops::weight_only_mm {

template <int kRow, DType kX, int kBits, int kGroups>
void launch_ring(Problem const& p, int split, int device, Stream stream) {
  constexpr RingConfig kConfig = kRingRows[kRow];
  using C =
      Ring<CudaType<kX>, kBits, kGroups, kConfig.teams, kConfig.ways, kConfig.slabs, kConfig.tokens, kConfig.blocks>;
  launch_matrix_tiles<C>(&ring_kernel<C>, kConfig, p, split, device, stream);
}

}  // namespace epiloq::ops::weight_only_mm
