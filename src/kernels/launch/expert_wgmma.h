#pragma once

// The launch of grouped_packed_mm's WGMMA kernel for experts (SM90): declared for dispatch/grouped_packed_mm,
// defined in sm90/w4a16/expert_gemm.cuh, and instantiated a format at a time in sources that CMake expands from
// kernels_experts.cu.in.

#include "kernels/launch/grouped_packed_mm.h"

namespace epiloq::ops::grouped_packed_mm {

inline constexpr int kMostWgmmaExperts = 512;

// A CTA tile: 64 weight rows of each of `warpgroups`, and tokens, a multiple of `chunk`, at most `chunks4` or, of 8-bit
// weights, `chunks8` times as many. With `rounds` weights are rounded with their scales (FP4 is exact). Few tokens, for
// which many warps convert weights and many stages are in flight; or many, which a weight is multiplied by once it is
// converted, and three stages.
struct ExpertTiles {
  int warpgroups, chunk, chunks4, chunks8;
  bool rounds;

  constexpr int chunks(int bits) const { return bits == 8 ? chunks8 : chunks4; }
};
inline constexpr std::array kExpertRows{ExpertTiles{4, 16, 4, 4, false}, ExpertTiles{2, 64, 4, 3, true}};
constexpr weight_only_mm::WgmmaConfig expert_config(int row, int bits) {
  ExpertTiles const& of = kExpertRows[row];
  return {of.warpgroups, 1, 1, of.chunk * of.chunks(bits), of.rounds};
}

template <int kRow, DType kX, Format kFormat>
void launch_expert_wgmma(Problem const&, int tiles, int split, int device, Stream);

}  // namespace epiloq::ops::grouped_packed_mm
