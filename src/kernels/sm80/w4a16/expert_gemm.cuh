#pragma once

// Weight-only GEMM for a mixture of experts (grouped_packed_mm, packed_fp4_mm) with mma.sync: the W4A16 GEMM, with a
// search for each CTA's expert. blockIdx.x enumerates the weight-row tiles of one token tile after the other. CTAs
// without a tile come last, so that the others spread evenly over the SMs. blockIdx.y is the
// slice of K.

#include "kernels/common/w4a16/convert_fp4.cuh"
#include "kernels/sm80/w4a16/expert_work.cuh"
#include "kernels/sm80/w4a16/gemm.cuh"

namespace epiloq::ops::grouped_packed_mm {

struct ExpertTile {
  Tile const& tile;
  float const* factors;  // per expert; may be null
  int row_tiles;

  __device__ __forceinline__ int first_token() const { return tile.first; }
  __device__ __forceinline__ int row_tile() const { return blockIdx.x % row_tiles; }
  __device__ __forceinline__ float factor() const { return factors != nullptr ? __ldg(factors + tile.expert) : 1.f; }
};

template <class S, class T>
__global__ __launch_bounds__(S::kThreads,
                             S::kBlocks) void grouped_kernel(__grid_constant__ Problem const p,
                                                             __grid_constant__ wo::StageLayout const layout) {
  extern __shared__ __align__(wo::kSharedLine) std::uint8_t shared[];
  auto& work = *reinterpret_cast<ExpertWork*>(shared);
  int const row_tiles = (p.product.weight.n + S::kRows - 1) / S::kRows;
  if (p.counts != nullptr) pdl_wait();
  if (threadIdx.x < 32) {
    int const index = blockIdx.x / row_tiles;
    Tile const found =
        p.counts != nullptr ? find_tile<S::kTokens>(p, index) : Tile{0, 0, p.product.m, index * S::kTokens};
    if (threadIdx.x == 0) work = {product_of<T>(p, found, layout.scale_bytes), found};
  }
  __syncthreads();
  if (work.tile.first >= work.product.m) {
    pdl_trigger();
    return;
  }
  auto const make_tokens = [&](int token, int) { return typename S::Tokens(work.product, token); };
  wo::multiply_tile<S, T>(work.product, layout, shared + kExpertWorkBytes, make_tokens,
                          ExpertTile{work.tile, p.factor, row_tiles});
}

}  // namespace epiloq::ops::grouped_packed_mm
