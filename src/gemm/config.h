#pragma once

// What a GEMM kernel is made from, as values: a structural type that is a template argument, a table row and a printed
// answer alike.

#include <cstdint>

namespace epiloq::gemm {

struct Shape {
  int m, n, k;
};

// SM75 and SM80: CUTLASS 2.x, mma.sync.
struct MmaConfig {
  Shape tile;
  Shape warp;
  int stages;

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
  int blocks_per_sm = 1;
  int early_bytes = 0;  // of a block's weights, asked for before the previous kernel has finished; needs swap
};

// SM80, at most a few tokens: each warp streams its own slice of K straight into registers.
struct SkinnyConfig {
  int slabs;   // of 16 weight rows, a block
  int tokens;  // a multiple of 8
  int warps;   // that share K
  int unroll;  // steps of 64 bytes of K in flight a warp
};

}  // namespace epiloq::gemm
