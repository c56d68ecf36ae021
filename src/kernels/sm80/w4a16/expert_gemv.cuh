#pragma once

// Weight-only GEMV for a mixture of experts of which few have tokens, each up to 8 at a time (grouped_packed_mm,
// packed_fp4_mm): the GEMV of one matrix, of an expert that each CTA finds. A CTA's warps alternate K steps, so that
// few weight rows occupy the device. blockIdx.x enumerates the weight-row tiles of one token tile after the other; CTAs
// without a tile come last. Compiled for SM90 alone, where it was measured.

#include "core/ceil_div.h"
#include "kernels/launch/expert_gemv.h"
#include "kernels/sm80/w4a16/expert_work.cuh"
#include "kernels/sm80/w4a16/gemv_fp4.cuh"
#include "kernels/sm80/w4a16/launch.cuh"

namespace epiloq::ops::grouped_packed_mm {

// Its tokens [first, first + kMost) alone.
template <class T, int kMost>
__device__ __forceinline__ wo::Problem tokens_of(wo::Problem product, int first) {
  product.x = static_cast<T const*>(product.x) + first * product.stride_x;
  product.out = static_cast<T*>(product.out) + first * product.stride_out;
  product.m = min(product.m - first, kMost);
  return product;
}

template <class S, class T>
__global__ __launch_bounds__(S::kThreads,
                             S::kBlocks) void expert_gemv_kernel(__grid_constant__ Problem const p,
                                                                 __grid_constant__ wo::GemvPipeline const pipeline) {
  auto& work = *reinterpret_cast<ExpertWork*>(+dynamic_smem);
  int const row_tiles = (p.product.weight.n + S::kRows - 1) / S::kRows;
  pdl_wait();
  if (threadIdx.x < 32) {
    Tile const found = find_tile<S::kTokens>(p, blockIdx.x / row_tiles);
    if (threadIdx.x == 0) {
      work = {tokens_of<T, S::kTokens>(product_of<T>(p, found, pipeline.weights.scale_bytes), found.first), found};
    }
  }
  __syncthreads();
  if (work.product.m <= 0) return pdl_trigger();
  float const* const factor = pipeline.factor != nullptr ? pipeline.factor + work.tile.expert : nullptr;
  wo::multiply_gemv<S, T>(work.product, pipeline, blockIdx.x % row_tiles, factor, dynamic_smem + kExpertWorkBytes);
}

template <class T, Format kFormat>
struct ExpertProducts {
  using Type = wo::HalfProducts<T, bits_of(kFormat), groups_of(kFormat), false, kExpertGemvPanels>;
};
template <class T, Format kFormat>
  requires(is_fp4(kFormat))
struct ExpertProducts<T, kFormat> {
  using Type = wo::Fp4Products<T, groups_of(kFormat), kExpertGemvPanels, 1>;
};
template <int kRow, class T, Format kFormat>
using ExpertGemv = wo::Gemv<typename ExpertProducts<T, kFormat>::Type, kExpertGemvPanels, kExpertGemvRows[kRow].warps,
                            kExpertGemvStages, kExpertGemvRows[kRow].blocks>;

template <int kRow, DType kX, Format kFormat>
void launch_expert_gemv(Problem const& p, int tiles, int split, int device, Stream stream) {
  using T = CudaType<kX>;
  using S = ExpertGemv<kRow, T, kFormat>;
  static_assert(S::kRows == kExpertGemvTileRows && S::kTokens == wo::kGemvTokens);
  static PerDevice prepared;
  wo::GemvPipeline const pipeline =
      wo::gemv_pipeline<S, groups_of(kFormat)>(p.product.weight, std::min(p.product.m, S::kTokens), split, p.factor);
  dim3 const grid(static_cast<unsigned>(tiles) * static_cast<unsigned>(ceil_div(p.product.weight.n, S::kRows)), split);
  int const bytes = wo::gemv_shared_bytes<S>(pipeline, kExpertWorkBytes, grid, device);
  wo::launch_kernel(expert_gemv_kernel<S, T>, prepared, "launching epiloq.grouped_packed_mm", p, pipeline, grid,
                    S::kThreads, bytes, device, stream);
}

}  // namespace epiloq::ops::grouped_packed_mm
