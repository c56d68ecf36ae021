#pragma once

// What a GEMM kernel is made from, as values: a structural type that is a template argument, a table row and a printed
// answer alike.

#include <cstdint>

#include "epiloq/tensor.h"

namespace epiloq::gemm {

struct Shape {
  int m, n, k;
};

// SM75, SM80 and SM89: CUTLASS 2.x, mma.sync. Tensor cores add float8 products with fewer bits than fp32 has; their
// sums are added up in fp32 every so often, unless fast_accum says to leave it.
struct MmaConfig {
  Shape tile;
  Shape warp;
  int stages;
  bool fast_accum = false;

  constexpr int shared_bytes() const { return (tile.m + tile.n) * tile.k * stages; }
};

// SM90: CUTLASS 3.x, TMA and wgmma. With swap the weights are the first operand and D^T is computed, so tile.m runs
// along N and tile.n along M.
enum class Schedule : std::uint8_t { kWarpSpecialized, kPingpong, kCooperative };
struct WgmmaConfig {
  Shape tile;
  int cluster_m, cluster_n;
  Schedule schedule;
  bool swap;
  bool fast_accum = false;
};

// What shares a scale beside a row of A: 128 columns of B and 128 of K, a column and 128 of K, or a column and all of
// K.
enum class Scales : std::uint8_t { kBlocks, kColumns, kWholeRows };

// SM90, scales every 128 of K or a whole row: warpgroups along M or along K, weights a tile, and how many times 64
// tokens a warpgroup multiplies with a stage's weights. Where that is twice, blocks take tiles in pairs.
struct GroupwiseConfig {
  int m_groups, k_groups, n;
  int rounds = 1;

  constexpr int tokens() const { return 64 * m_groups * rounds; }
};

// SM80, at most a few tokens: each warp streams its own slice of K straight into registers.
struct SkinnyConfig {
  int panels;  // of 16 weight rows, a block
  int tokens;  // a multiple of 8
  int warps;   // that share K
  int unroll;  // steps of 64 bytes of K in flight a warp
};

// SM75 and SM80, products of blocks with their own scales (sm80/w4a8_gemm.cuh).
struct BlockwiseConfig {
  int warp_m, warp_n;    // of D, a warp: multiples of 16
  int warps_m, warps_n;  // a team
  int k_groups;          // that share K
  int stages;            // of 128 values of K, a team; one on SM75, which keeps the next in registers

  constexpr int tile_m() const { return warp_m * warps_m; }
  constexpr int tile_n() const { return warp_n * warps_n; }
  // Values and parameters in flight, or at the end every team's float32 sums.
  constexpr int shared_bytes(int group, int bits) const {
    int const stage = tile_m() * 128 + tile_n() * 16 * bits + 128 / group * 12 * (tile_m() + tile_n());
    int const sums = tile_m() * (tile_n() + 8) * 4;
    return k_groups * (stages * stage > sums ? stages * stage : sums);
  }
};

}  // namespace epiloq::gemm
