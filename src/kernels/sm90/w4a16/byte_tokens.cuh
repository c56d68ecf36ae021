#pragma once

// SM90: the weight-only WGMMA GEMM with float8 E4M3 tokens, a scale each (w4a8_mm).
//
// Tokens are permuted in each 16 columns, so that the fragments of packed_layout.h, made for 16-bit tokens, are those
// of the 8-bit instruction: a lane has columns 2 t, 2 t + 8, 2 t + 1 and 2 t + 9 of each 16 where wgmma has 4 t to 4 t
// + 3.

#include <cuda_fp8.h>

#include "kernels/common/w4a16/convert.cuh"
#include "kernels/launch/w4a8_mm.h"
#include "kernels/sm90/w4a16/w4a16_gemm.cuh"
#include "kernels/sm90/w4a16/w4a16_launch.cuh"

namespace epiloq::ops::weight_only_mm {

// Two words of 4-bit integers u (32 columns of rows g and g + 8) to E4M3 codes of u - 8. Codes up to 16 are linear, so
// that a magnitude is its own code, a multiple of 2^-9: |u - 8| is u ^ 8 from 8 on, and (u ^ 7) + 1 below.
template <>
struct Fragment<__nv_fp8_e4m3, 4> {
  static constexpr float kUnit = 512;
  struct Zero {};
  static __device__ __forceinline__ Zero zero(Word, Word) { return {}; }

  // `nibbles` may have other bits above each byte's low four; `negative` is 1 in bytes below 8.
  static __device__ __forceinline__ Word codes(Word nibbles, Word negative) {
    Word const flip = 0x08080808u - negative;
    Word flipped;
    asm("lop3.b32 %0, %1, %2, %3, 0x78;" : "=r"(flipped) : "r"(flip), "r"(nibbles), "r"(0x0f0f0f0fu));
    return negative * 129 + flipped;  // + 1, and the sign bit
  }
  static __device__ __forceinline__ void make(Word (&a)[4], Word const* w, Zero) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      a[2 * i] = codes(w[i], ~w[i] >> 3 & 0x01010101u);
      a[2 * i + 1] = codes(w[i] >> 4, ~w[i] >> 7 & 0x01010101u);
    }
  }
};

struct ByteParams : TileParams {
  float const* scale_a;
  int stride_scale;  // 0 or 1
};

struct ByteTokens : RowTokens<1, ByteParams> {
  using RowTokens::RowTokens;

  // Of two neighbouring tokens; those past the last one are not stored.
  static __device__ __forceinline__ float2 scale_of(TileParams const& params, int token) {
    auto const& p = static_cast<ByteParams const&>(params);
    int const last = p.tokens - 1;
    return {__ldg(p.scale_a + min(token, last) * p.stride_scale),
            __ldg(p.scale_a + min(token + 1, last) * p.stride_scale)};
  }
};

}  // namespace epiloq::ops::weight_only_mm

namespace epiloq::ops::w4a8_mm {

template <int kRow, DType kOut, int kGroups>
void launch_wgmma(Problem const& p, int split, int device, Stream stream) {
  namespace wo = weight_only_mm;
  constexpr wo::WgmmaConfig kConfig = kRows[kRow];
  using C = wo::Wgmma<CudaType<kOut>, 4, kGroups, kConfig.m_groups, kConfig.k_groups, kConfig.blocks, kConfig.tokens,
                      false, wo::ByteTokens, __nv_fp8_e4m3>;
  wo::Problem const& of = p.product;
  wo::MatrixReads const reads{wo::WeightReads::of(of.weight, C::kRows, C::kGroups),
                              of.x,
                              of.stride_x,
                              of.weight.padded_k,
                              of.m,
                              C::Tokens::kBytes,
                              wo::TokenBoxes::of(of.m, C::kTokens)};
  wo::ByteParams const params{wo::params_of<C>(kConfig, of, split, wo::cached_maps(reads, device), device), p.scale_a,
                              p.stride_scale};
  wo::launch_tiles<C>(&wo::wgmma_kernel<C>, kConfig, params, split, device, stream, "launching epiloq.w4a8_mm");
}

}  // namespace epiloq::ops::w4a8_mm
