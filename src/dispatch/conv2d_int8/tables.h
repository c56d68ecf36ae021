#pragma once

// Every tile that conv2d_int8 is compiled for, and what chooses among them. Data: a new tile is a row.

#include <array>

#include "core/target.h"
#include "kernels/conv2d/int8_config.h"

namespace epiloq::ops::conv2d_int8 {

// Rows from kFirstSm80Tile on are for what has no wgmma as well, those from kFirstSm75Tile on are all that SM75 has.
inline constexpr std::array kTiles{
    TileConfig{Mma::kWgmma, 64, 128, 2, 1, 128, 3, 16, 2},  // 0: 128 x 128
    TileConfig{Mma::kWgmma, 64, 64, 2, 1, 128, 3, 16, 3},   // 1: 128 x 64
    TileConfig{Mma::kWgmma, 64, 128, 1, 1, 128, 4, 16, 2},  // 2: 64 x 128
    TileConfig{Mma::kWgmma, 64, 64, 1, 1, 128, 4, 16, 3},   // 3: 64 x 64
    TileConfig{Mma::kWgmma, 64, 32, 1, 1, 128, 4, 16, 4},   // 4: 64 x 32
    TileConfig{Mma::kSync, 64, 32, 2, 4, 128, 3, 16, 2},    // 5: 128 x 128
    TileConfig{Mma::kSync, 64, 32, 2, 2, 64, 4, 16, 3},     // 6: 128 x 64
    TileConfig{Mma::kSync, 32, 32, 4, 1, 64, 4, 16, 4},     // 7: 128 x 32
    TileConfig{Mma::kSync, 32, 32, 2, 2, 64, 4, 16, 4},     // 8: 64 x 64
    TileConfig{Mma::kSync, 32, 32, 2, 2, 64, 4, 4, 4},      // 9
    TileConfig{Mma::kSync, 32, 32, 2, 2, 32, 4, 1, 4},      // 10: few columns in all
};
inline constexpr int kFirstSm80Tile = 5, kFirstSm75Tile = 8;

// What the choice is made by: cycles of an SM, fitted to tools/conv_sweep.py's times of 28 layers (H200, 2026-11-20,
// 1.7 GHz assumed). docs/convolutions.md has the model in words and how well it chooses.
struct Costs {
  double byte;    // of a stage, to copy; products hide behind
  double stage;   // what a block by itself waits for at a stage's barriers
  double output;  // to finish
};
constexpr Costs costs_of(Mma mma) { return mma == Mma::kWgmma ? Costs{0.029, 190, 0.41} : Costs{0.041, 16, 0.35}; }
// As many times the cost of a byte, where fewer than 16 channels are copied at a time; of 1 counted in instructions.
constexpr double copies_of(int vector) { return vector == 16 ? 1 : vector == 4 ? 2.6 : 4; }
// What a block by itself waits for: a stage's bytes, but for other stages on their way; to begin and to end; and for
// each output of a thread.
inline constexpr double kWaitOfByte = 0.044, kBlock = 4700, kOutputOfThread = 73;
inline constexpr double kEnd = 1300;   // of an SM's last blocks, which no others hide
inline constexpr double kShown = 0.1;  // of the shorter of waiting and working, which the other does not hide

// What adding up over a cluster takes. Odd numbers of blocks take less; 7 have not been measured.
inline constexpr std::array<double, kMaxCluster> kCluster{0, 1200, 730, 2100, 990, 2200, 3500, 3500};

}  // namespace epiloq::ops::conv2d_int8
