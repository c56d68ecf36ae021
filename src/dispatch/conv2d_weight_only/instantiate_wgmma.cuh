#pragma once

// From a row of the WGMMA table to the launch, for one type, bit width and group size.

#include "dispatch/conv2d_weight_only/tables.h"
#include "kernels/sm90/conv2d_w4a16_gemm.cuh"

namespace epiloq::ops::conv2d_weight_only {

template <int kRow, DType kX, int kBits, int kGroups>
void launch_wgmma(Patches const& problem, int split, int device, Stream stream) {
  constexpr wo::WgmmaConfig kConfig = kWgmmaRows[kRow];
  using C = wo::Wgmma<CudaType<kX>, kBits, kGroups, kConfig.m_groups, kConfig.k_groups, kConfig.blocks, kConfig.tokens,
                      kConfig.rounds, ImageTokens>;
  wo::Problem const& p = problem.product;
  ImageReads const reads{wo::WeightReads::of(p.weight, C::kRows, kGroups), p.x, problem.shape,
                         wo::TokenBoxes::of(p.m, C::kTokens)};
  ImageParams const params{wo::params_of<C>(kConfig, p, split, wo::cached_maps(reads, device), device), problem.shape,
                           problem.padded_channels};
  wo::launch_tiles<C>(&wo::wgmma_kernel<C>, kConfig, params, split, device, stream,
                      "launching epiloq.conv2d_weight_only");
}

}  // namespace epiloq::ops::conv2d_weight_only
