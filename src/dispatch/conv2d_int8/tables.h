#pragma once

// conv2d_int8's tiles and the constants of its cost model. A new tile is a row.

#include <array>

#include "core/target.h"
#include "kernels/conv2d/int8_config.h"

namespace epiloq::ops::conv2d_int8 {

// Rows from kFirstSm80Tile on need no wgmma; SM75 has those from kFirstSm75Tile on.
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

// Cost model, in cycles of an SM, fitted to tools/kernel_times/conv_sweep.py; docs/guide/convolutions.md describes it.
struct Costs {
  double byte;    // per byte of a stage, overlapped with products
  double stage;   // a CTA's latency at a stage's barriers
  double output;  // epilogue, per output
};
constexpr Costs costs_of(Mma mma) { return mma == Mma::kWgmma ? Costs{0.029, 190, 0.41} : Costs{0.041, 16, 0.35}; }
// Cost of a byte if fewer than 16 channels are copied at a time, relative to 16.
constexpr double copies_of(int vector) { return vector == 16 ? 1 : vector == 4 ? 2.6 : 4; }
// Latency of one CTA: per byte of a stage, divided by the stages in flight; to start and end; per output of a thread.
inline constexpr double kWaitOfByte = 0.044, kBlock = 4700, kOutputOfThread = 73;
inline constexpr double kEnd = 1300;   // an SM's last CTAs, which nothing overlaps
inline constexpr double kShown = 0.1;  // share of the shorter of latency and throughput that is not hidden

// Reduction over a cluster of 1 to 8 CTAs; 7 is not measured.
inline constexpr std::array<double, kMaxCluster> kCluster{0, 1200, 730, 2100, 990, 2200, 3500, 3500};

}  // namespace epiloq::ops::conv2d_int8
