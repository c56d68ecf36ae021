#pragma once

// Every tile that conv2d_int8 is compiled for, and what chooses among them. Data: a new tile is a row.

#include <array>

namespace epiloq::ops::conv2d_int8 {

inline constexpr int kDepth = 64;  // columns a stage
inline constexpr int kRun = 8;     // neighbouring outputs that a thread finishes

// Output pixels (m) and channels (n) of a warp's tile, warps along each, stages, and how many channels are copied at a
// time: 16, 4 or 1, which must divide the channels of a group. Then what the choice weighs: blocks that an SM holds,
// and products a cycle and SM, as shared memory feeds the tensor cores with a warp's tile of that shape.
struct TileConfig {
  int warp_m, warp_n, warps_m, warps_n;
  int stages;
  int vector;
  int blocks, rate;

  constexpr int tile_m() const { return warp_m * warps_m; }
  constexpr int tile_n() const { return warp_n * warps_n; }
  constexpr int threads() const { return 32 * warps_m * warps_n; }
  // The ring of stages, then a Window a pixel.
  constexpr int shared_bytes() const { return stages * (tile_m() + tile_n()) * kDepth + tile_m() * 16; }
};

// Of the tiles that a problem allows, the one whose busiest SM is done first. Everything here is reasoned from bytes in
// flight, registers and issue slots, and not yet measured. SM75 has the tiles from kFirstSm75Tile on.
inline constexpr std::array kTiles{
    TileConfig{64, 64, 2, 4, 4, 16, 1, 4096},  // 0: 128 x 256
    TileConfig{64, 64, 2, 2, 4, 16, 2, 4096},  // 1: 128 x 128
    TileConfig{64, 64, 4, 1, 4, 16, 2, 4096},  // 2: 256 x 64
    TileConfig{64, 32, 2, 2, 4, 16, 3, 2700},  // 3: 128 x 64
    TileConfig{32, 32, 4, 1, 4, 16, 4, 1700},  // 4: 128 x 32
    TileConfig{32, 32, 2, 2, 4, 16, 4, 2048},  // 5: 64 x 64
    TileConfig{32, 32, 2, 2, 4, 4, 4, 1024},   // 6
    TileConfig{32, 32, 2, 2, 3, 1, 4, 256},    // 7
};
inline constexpr int kFirstSm75Tile = 5;

// Cycles of an SM for an output, and for a block to begin and to end, which other blocks of the SM hide.
inline constexpr double kCyclesOfOutput = 0.1;
inline constexpr double kCyclesOfBlock = 3000;

}  // namespace epiloq::ops::conv2d_int8
