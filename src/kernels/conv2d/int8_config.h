#pragma once

// What a tile of conv2d_int8 is made from.

#include <algorithm>

namespace epiloq::ops::conv2d_int8 {

inline constexpr int kRun = 8;  // neighbouring outputs that a thread finishes

enum class Mma { kSync, kWgmma };

// Output pixels (m) and channels (n) of a team, which is a warp with mma.sync and a warpgroup with wgmma; teams along
// each; columns a stage, stages, and how many channels are copied at a time: 16, 4 or 1, which must divide the channels
// of a group. Then the blocks that an SM holds.
struct TileConfig {
  Mma mma;
  int team_m, team_n, teams_m, teams_n;
  int depth, stages, vector;
  int blocks;

  constexpr int tile_m() const { return team_m * teams_m; }
  constexpr int tile_n() const { return team_n * teams_n; }
  constexpr int threads() const { return (mma == Mma::kWgmma ? 128 : 32) * teams_m * teams_n; }
  constexpr int stage_bytes() const { return (tile_m() + tile_n()) * depth; }
  // Stages on their way while one is multiplied. With wgmma the one before may still be read, by other warpgroups.
  constexpr int ahead() const { return stages - (mma == Mma::kWgmma ? 2 : 1); }
  // A ring of stages, in whose place sums come.
  constexpr int ring_bytes() const { return std::max(stages * stage_bytes(), tile_m() * tile_n() * 4); }
  // The ring, then a Window a pixel.
  constexpr int shared_bytes() const { return ring_bytes() + tile_m() * 16; }
};

}  // namespace epiloq::ops::conv2d_int8
