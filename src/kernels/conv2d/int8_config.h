#pragma once

// Configuration of a conv2d_int8 tile.

#include <algorithm>

namespace epiloq::ops::conv2d_int8 {

inline constexpr int kRun = 8;  // neighbouring outputs that a thread finishes

enum class Mma { kSync, kWgmma };

// Warp tile: output pixels (m) and channels (n) of a warp with mma.sync, of a warpgroup with wgmma; the number of those
// along each. Then columns per stage, stages, channels per copy (16, 4 or 1, which must divide the channels of a group)
// and resident CTAs per SM.
struct TileConfig {
  Mma mma;
  int warp_m, warp_n, warps_m, warps_n;
  int depth, stages, vector;
  int blocks;

  constexpr int tile_m() const { return warp_m * warps_m; }
  constexpr int tile_n() const { return warp_n * warps_n; }
  constexpr int threads() const { return (mma == Mma::kWgmma ? 128 : 32) * warps_m * warps_n; }
  constexpr int stage_bytes() const { return (tile_m() + tile_n()) * depth; }
  // Stages in flight while one is multiplied. With wgmma other warpgroups may still read the previous one.
  constexpr int ahead() const { return stages - (mma == Mma::kWgmma ? 2 : 1); }
  // The stages, which the sums replace.
  constexpr int pipeline_bytes() const { return std::max(stages * stage_bytes(), tile_m() * tile_n() * 4); }
  // The stages, then a Window per pixel.
  constexpr int shared_bytes() const { return pipeline_bytes() + tile_m() * 16; }
};

}  // namespace epiloq::ops::conv2d_int8
