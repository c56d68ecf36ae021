#pragma once

// The launches of grouped_packed_mm's persistent kernels for experts (SM90): declared for dispatch/grouped_packed_mm,
// defined in sm90/w4a16/expert_gemm.cuh and expert_decode.cuh, and instantiated a format at a time in sources that
// CMake expands from kernels.cu.in.

#include "kernels/launch/grouped_packed_mm.h"

namespace epiloq::ops::grouped_packed_mm {

inline constexpr int kMostTabledExperts = 512;  // a CTA has a table of their tiles

// WGMMA. A CTA tile: 64 weight rows of each of `warpgroups`, and tokens, a multiple of `chunk`, at most `chunks4` or,
// of 8-bit weights, `chunks8` times as many. With `rounds` weights are rounded with their scales (FP4 is exact). Few
// tokens, for which many warps convert weights and many stages are in flight; or many, which a weight is multiplied by
// once it is converted, and three stages.
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

// mma.sync, for few tokens: in chunks of kDecodeChunk, at most config.tokens at a time. Two K groups halve what a warp
// does for a tile, if there are few. `wave`: time of a K step of all CTAs that run at a time, relative to the second
// row's, for the choice among them; measured on an H200.
inline constexpr int kDecodeChunk = 8;
struct ExpertDecodeTiles {
  weight_only_mm::DecodeConfig config;
  double wave;
};
inline constexpr std::array kExpertDecodeRows{ExpertDecodeTiles{{4, 1, 2, 16, 4}, 1.3},
                                              ExpertDecodeTiles{{4, 1, 2, 24, 3}, 1.},
                                              ExpertDecodeTiles{{2, 2, 2, 24, 3}, .57}};
inline constexpr double kExpertWgmmaWave = .8;  // of WGMMA's first row
// Four groups of integers in a K step, with zero points of each, leave registers for sums of 16 tokens.
constexpr weight_only_mm::DecodeConfig decode_config(int row, Format format) {
  weight_only_mm::DecodeConfig config = kExpertDecodeRows[row].config;
  if (format == Format::kInt4Of32) config.tokens = 2 * kDecodeChunk;
  return config;
}

template <int kRow, DType kX, Format kFormat>
void launch_expert_wgmma(Problem const&, int tiles, int split, int device, Stream);
template <int kRow, DType kX, Format kFormat>
void launch_expert_decode(Problem const&, int tiles, int split, int device, Stream);

}  // namespace epiloq::ops::grouped_packed_mm
