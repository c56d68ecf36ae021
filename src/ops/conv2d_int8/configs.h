#pragma once

// Every tile that conv2d_int8 is compiled for, and which problem takes which. Data: a new tile is one row and one rule.

#include <array>
#include <climits>

namespace epiloq::ops::conv2d_int8 {

inline constexpr int kDepth = 64;  // columns a stage
inline constexpr int kRun = 8;     // neighbouring outputs that a thread finishes

// Output pixels (m) and channels (n) of a warp's tile, warps along each, stages, and how many channels
// are copied at a time: 16, 4 or 1, which must divide the channels of a group.
struct TileConfig {
  int warp_m, warp_n, warps_m, warps_n;
  int stages;
  int vector;

  constexpr int tile_m() const { return warp_m * warps_m; }
  constexpr int tile_n() const { return warp_n * warps_n; }
  constexpr int threads() const { return 32 * warps_m * warps_n; }
  // The ring of stages, then a Window a pixel.
  constexpr int shared_bytes() const { return stages * (tile_m() + tile_n()) * kDepth + tile_m() * 16; }
};

// Reasoned from bytes in flight and registers, not yet measured. SM75 has the last kSm75Tiles.
inline constexpr std::array kTiles{
    TileConfig{64, 64, 2, 4, 4, 16},  // 0: 128 x 256
    TileConfig{64, 64, 2, 2, 4, 16},  // 1: 128 x 128
    TileConfig{32, 32, 4, 1, 4, 16},  // 2: 128 x 32
    TileConfig{32, 32, 2, 2, 4, 16},  // 3: 64 x 64
    TileConfig{32, 32, 2, 2, 4, 4},   // 4
    TileConfig{32, 32, 2, 2, 3, 1},   // 5
};
inline constexpr int kFirstSm75Tile = 3;

// Problems of at most n_max output channels a group, whose tiles fill the SMs at least `waves` times, take row `tile`,
// if it copies as many channels at a time as the problem allows; rules are tried in order. The last rule of each
// vector takes everything.
struct Rule {
  int n_max;
  int waves;
  int tile;
};
inline constexpr int kAny = INT_MAX;
inline constexpr std::array kRules{
    Rule{32, 1, 2}, Rule{64, 0, 3}, Rule{128, 1, 1}, Rule{kAny, 2, 0},
    Rule{kAny, 1, 1}, Rule{kAny, 0, 3}, Rule{kAny, 0, 4}, Rule{kAny, 0, 5},
};

}  // namespace epiloq::ops::conv2d_int8
