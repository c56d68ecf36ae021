#pragma once

// From a row of the mma.sync table to the launch (SM80 and newer).

#include "dispatch/groupwise_mm/tables.h"
#include "kernels/launch/groupwise_mm.h"
#include "kernels/sm80/groupwise_gemm.cuh"

namespace epiloq::ops::groupwise_mm {

template <int kRow, gemm::Scales kScales, DType kElement>
void Mma<kRow, kScales, kElement>::launch(gemm::GroupwiseProblem const& problem, DType out, int device, Stream stream) {
  constexpr WarpTileConfig c = kMmaTiles[kRow];
  using Kernel = gemm::MmaGroupwise<c.warp_m, c.warp_n, c.warps_m, c.warps_n, c.stages, kScales, CudaType<kElement>>;
  gemm::launch_mma_groupwise<Kernel>(problem, out, device, stream);
}

}  // namespace epiloq::ops::groupwise_mm
