#pragma once

#include "gemm/mma_groupwise.cuh"
#include "ops/groupwise_mm/configs.h"
#include "ops/groupwise_mm/kernels.h"

namespace epiloq::ops::groupwise_mm {

template <int kRow, gemm::Scales kScales, DType kElement>
void Mma<kRow, kScales, kElement>::launch(gemm::GroupwiseProblem const& problem, DType out, int device, Stream stream) {
  constexpr BlockwiseConfig c = kMmaTiles[kRow];
  using Kernel = gemm::MmaGroupwise<c.warp_m, c.warp_n, c.warps_m, c.warps_n, c.stages, kScales, CudaType<kElement>>;
  gemm::launch_mma_groupwise<Kernel>(problem, out, device, stream);
}

}  // namespace epiloq::ops::groupwise_mm
