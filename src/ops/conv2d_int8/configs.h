#pragma once

// Every tile that conv2d_int8 is compiled for, and what chooses among them. Data: a new tile is a row.

#include <algorithm>
#include <array>

namespace epiloq::ops::conv2d_int8 {

inline constexpr int kRun = 8;         // neighbouring outputs that a thread finishes
inline constexpr int kMaxCluster = 8;  // blocks that share K

enum class Mma { kSync, kWgmma };

// Output pixels (m) and channels (n) of a team, which is a warp with mma.sync and a warpgroup with wgmma; teams along
// each; columns a stage, stages, and how many channels are copied at a time: 16, 4 or 1, which must divide the channels
// of a group. Then the blocks that an SM holds, and products a cycle and SM, for the choice alone.
struct TileConfig {
  Mma mma;
  int team_m, team_n, teams_m, teams_n;
  int depth, stages, vector;
  int blocks, rate;

  constexpr int tile_m() const { return team_m * teams_m; }
  constexpr int tile_n() const { return team_n * teams_n; }
  constexpr int threads() const { return (mma == Mma::kWgmma ? 128 : 32) * teams_m * teams_n; }
  // A ring of stages, in whose place sums come.
  constexpr int ring_bytes() const { return std::max(stages * (tile_m() + tile_n()) * depth, tile_m() * tile_n() * 4); }
  // The ring, then a Window a pixel.
  constexpr int shared_bytes() const { return ring_bytes() + tile_m() * 16; }
};

// Rows from kFirstSm80Tile on are for what has no wgmma, those from kFirstSm75Tile on are all that SM75 has.
inline constexpr std::array kTiles{
    TileConfig{Mma::kWgmma, 64, 128, 2, 1, 128, 3, 16, 2, 3000},  // 0: 128 x 128
    TileConfig{Mma::kWgmma, 64, 256, 2, 1, 128, 4, 16, 1, 3000},  // 1: 128 x 256
    TileConfig{Mma::kWgmma, 64, 64, 2, 1, 128, 3, 16, 3, 2500},   // 2: 128 x 64
    TileConfig{Mma::kWgmma, 64, 128, 1, 1, 128, 4, 16, 2, 2500},  // 3: 64 x 128
    TileConfig{Mma::kWgmma, 64, 64, 1, 1, 128, 4, 16, 3, 2000},   // 4: 64 x 64
    TileConfig{Mma::kWgmma, 64, 32, 1, 1, 128, 4, 16, 4, 1300},   // 5: 64 x 32
    TileConfig{Mma::kSync, 64, 64, 2, 4, 64, 4, 16, 1, 2000},     // 6: 128 x 256
    TileConfig{Mma::kSync, 64, 64, 2, 2, 64, 4, 16, 2, 2000},     // 7: 128 x 128
    TileConfig{Mma::kSync, 64, 32, 2, 4, 128, 3, 16, 2, 2000},    // 8: 128 x 128, more warps
    TileConfig{Mma::kSync, 64, 32, 2, 2, 64, 4, 16, 3, 1700},     // 9: 128 x 64
    TileConfig{Mma::kSync, 32, 32, 4, 1, 64, 4, 16, 4, 1200},     // 10: 128 x 32
    TileConfig{Mma::kSync, 32, 32, 2, 2, 64, 4, 16, 4, 1400},     // 11: 64 x 64
    TileConfig{Mma::kSync, 32, 32, 2, 2, 64, 4, 4, 4, 700},       // 12
    TileConfig{Mma::kSync, 32, 32, 2, 2, 64, 3, 1, 4, 200},       // 13
};
inline constexpr int kFirstSm80Tile = 6, kFirstSm75Tile = 11;

// Cycles of an SM: for an output; of a block to begin and to end, which other blocks hide; the least of a stage, whose
// barriers and latencies alone last so long; and to add up in a cluster. Reasoned, not yet measured.
inline constexpr double kCyclesOfOutput = 0.1;
inline constexpr double kCyclesOfBlock = 3500;
inline constexpr double kCyclesOfStage = 450;
inline constexpr double kCyclesOfCluster = 1500;

}  // namespace epiloq::ops::conv2d_int8
