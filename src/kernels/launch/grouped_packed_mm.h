#pragma once

// The launches of grouped_packed_mm: declared for dispatch/grouped_packed_mm, defined in its
// instantiate.cuh, and instantiated a table row and type at a time in sources that CMake expands from kernels.cu.in.

#include <array>

#include "kernels/common/w4a16/config.h"
#include "problems/grouped_packed.h"
#include "problems/packed_layout.h"

namespace epiloq::ops::grouped_packed_mm {

// What a kernel is compiled for: codes, and scale groups per K step of 128 columns.
enum class Format { kInt4Wide, kInt4Of64, kInt4Of32, kInt8Wide, kMxfp4, kNvfp4 };
inline constexpr int kFormats = 6;
constexpr bool is_fp4(Format format) { return format == Format::kMxfp4 || format == Format::kNvfp4; }
constexpr int bits_of(Format format) { return format == Format::kInt8Wide ? 8 : 4; }
constexpr int groups_of(Format format) {
  if (format == Format::kNvfp4) return 8;
  if (format == Format::kMxfp4 || format == Format::kInt4Of32) return 4;
  return format == Format::kInt4Of64 ? 2 : 1;
}

// CTA tile: 128 weight rows by `tokens` tokens; pipeline stages for 4 and 8 bits; resident CTAs per SM; columns that a
// warp multiplies at a time before SM90, at most, as registers allow.
struct Config {
  int tokens, stages4, stages8, blocks, columns;
};
inline constexpr int kWarps = 4, kTileRows = 32 * kWarps;
inline constexpr std::array kRows{Config{8, 4, 3, 4, 128}, Config{16, 4, 3, 4, 128}, Config{32, 4, 3, 3, 128},
                                  Config{64, 3, 2, 2, 64}};

// Shared memory of a CTA before its stages, for what it multiplies.
inline constexpr int kExpertWorkBytes = 256;

// GEMV of one matrix of FP4 weights, for at most `tiles` tiles of kGemvTile tokens; see GemvConfig. Few rows per CTA by
// many warps where there are few CTAs, small CTAs where there are many; many rows per warp spare reads of tokens, and
// shared memory for them limits stages.
inline constexpr int kGemvTile = 8;
struct Fp4GemvConfig {
  int panels, warps, stages, blocks, tiles;

  constexpr int tokens() const { return kGemvTile * tiles; }
  constexpr int rows() const { return weight_only_mm::kPanelRows * panels; }
};
inline constexpr std::array kGemvRows{Fp4GemvConfig{2, 16, 2, 1, 1}, Fp4GemvConfig{2, 8, 3, 2, 1},
                                      Fp4GemvConfig{4, 4, 3, 4, 1},  Fp4GemvConfig{4, 4, 2, 4, 1},
                                      Fp4GemvConfig{4, 8, 3, 1, 2},  Fp4GemvConfig{8, 4, 2, 2, 2},
                                      Fp4GemvConfig{4, 4, 2, 3, 2}};

// `tiles` tiles of tokens; the CTAs of a cluster split K.
using Launch = void (*)(Problem const&, int tiles, int split, int device, Stream);

template <int kRow, DType kX, Format kFormat>
void launch_grouped(Problem const&, int tiles, int split, int device, Stream);
template <int kRow, DType kX, Format kFormat>
void launch_gemv(Problem const&, int tiles, int split, int device, Stream);

}  // namespace epiloq::ops::grouped_packed_mm
