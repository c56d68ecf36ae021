#pragma once

// Configuration of a conv2d_int8 tile.

#include <algorithm>

namespace epiloq::ops::conv2d_int8 {

inline constexpr int kRun = 8;  // neighbouring outputs that a thread finishes

enum class Mma { kSync, kWgmma };

// Tile of output pixels (m) and channels (n) per team, a warp with mma.sync or a warpgroup with wgmma; teams along
// each; columns per stage, stages, and channels per copy: 16, 4 or 1, which must divide the channels of a group. Then
// resident CTAs per SM.
struct TileConfig {
  Mma mma;
  int team_m, team_n, teams_m, teams_n;
  int depth, stages, vector;
  int blocks;

  constexpr int tile_m() const { return team_m * teams_m; }
  constexpr int tile_n() const { return team_n * teams_n; }
  constexpr int threads() const { return (mma == Mma::kWgmma ? 128 : 32) * teams_m * teams_n; }
  constexpr int stage_bytes() const { return (tile_m() + tile_n()) * depth; }
  // Stages in flight while one is multiplied. With wgmma other warpgroups may still read the previous one.
  constexpr int ahead() const { return stages - (mma == Mma::kWgmma ? 2 : 1); }
  // The stages, in whose place the sums come.
  constexpr int ring_bytes() const { return std::max(stages * stage_bytes(), tile_m() * tile_n() * 4); }
  // The stages, then a Window per pixel.
  constexpr int shared_bytes() const { return ring_bytes() + tile_m() * 16; }
};

}  // namespace epiloq::ops::conv2d_int8
