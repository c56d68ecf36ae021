#pragma once

// Compile-time configurations of GEMM kernels: structural types used as template arguments, table rows and
// printed answers.

#include <cstdint>

#include "epiloq/tensor.h"

namespace epiloq::gemm {

struct Shape {
  int m, n, k;
};

// SM75, SM80 and SM89: CUTLASS 2.x, mma.sync. FP8 tensor cores accumulate with fewer bits than FP32; partial sums are
// promoted to FP32 at intervals unless fast_accum is set.
struct CutlassMmaConfig {
  Shape tile;
  Shape warp;
  int stages;
  bool fast_accum = false;

  constexpr int shared_bytes() const { return (tile.m + tile.n) * tile.k * stages; }
};

// SM90: CUTLASS 3.x, TMA and wgmma. With swap the weights are the first operand and D^T is computed: tile.m runs along
// N and tile.n along M.
enum class Schedule : std::uint8_t { kWarpSpecialized, kPingpong, kCooperative };
struct CutlassWgmmaConfig {
  Shape tile;
  int cluster_m, cluster_n;
  Schedule schedule;
  bool swap;
  bool fast_accum = false;
};

// Granularity of B's scales: 128 columns x 128 of K, a column x 128 of K, the same where A has a scale per row for all
// of K (computes D^T), or a column x all of K.
enum class Scales : std::uint8_t { kBlocks, kColumns, kColumnsOfWholeRows, kPerRowScales };

// SM90 groupwise GEMM: consumer warpgroups along M or along K, columns of B per tile, and how many times 64 tokens a
// warpgroup multiplies by one stage of weights. With two rounds, tiles are scheduled in pairs.
struct GroupwiseConfig {
  int m_groups, k_groups, n;
  int rounds = 1;

  constexpr int tokens() const { return 64 * m_groups * rounds; }
};

// SM80 skinny GEMM: each warp streams its own slice of K straight into registers.
struct SkinnyConfig {
  int panels;  // of 16 weight rows, per CTA
  int tokens;  // a multiple of 8
  int warps;   // that split K
  int unroll;  // steps of 64 bytes of K in flight per warp
};

// SM75 and SM80 with mma.sync: online_quant_mm (sm80/online_quant_gemm.cuh), and SM80 groupwise_mm.
struct WarpTileConfig {
  int warp_m, warp_n;    // warp tile, multiples of 16
  int warps_m, warps_n;  // warps of a K group
  int k_groups;          // groups of warps that split K
  int stages;            // K steps of 128 per K group; one on SM75, which keeps the next in registers

  constexpr int tile_m() const { return warp_m * warps_m; }
  constexpr int tile_n() const { return warp_n * warps_n; }
  // Of online_quant_mm: stages with their parameters, or at the end the FP32 sums of every K group.
  constexpr int shared_bytes(int group, int bits) const {
    int const stage = tile_m() * 128 + tile_n() * 16 * bits + 128 / group * 12 * (tile_m() + tile_n());
    int const sums = tile_m() * (tile_n() + 8) * 4;
    return k_groups * (stages * stage > sums ? stages * stage : sums);
  }
};

}  // namespace epiloq::gemm
