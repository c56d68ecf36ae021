#pragma once

// A slab of an int8 weight by many tokens with AMX: tiles of 16 tokens by 64 columns, and of 16 weight rows by as many,
// whose words of four columns lie as `order8` has them.

#include "core/host_int8_slab.h"
#include "core/host_tiles.h"

#ifdef EPILOQ_HAS_CLONES
#define EPILOQ_INT8_TILES gnu::target("arch=x86-64-v4,avx512vnni,amx-tile,amx-int8")

namespace epiloq {

// What is left of the tokens takes VNNI.
inline bool has_int8_tiles() { return has_tiles(TileKind::kInt8) && __builtin_cpu_supports("avx512vnni"); }

struct MultiplyInt8InTiles {
  using One = MultiplyInt8<VnniBytes>;
  using Slab = One::Slab;
  static constexpr int kPiece = 1024;  // columns that are brought into order at a time

  // As MultiplyInt8, of tokens whose rows are zeros from k up to a multiple of kTileBytes.
  [[EPILOQ_INT8_TILES]] static void run(Int8SlabByTokens const& s, std::int32_t* sums) {
    Tiles const tiles;
    Slab::Rows const rows(s.weight, s.stride, s.rows);
    Slab::Column words[kPiece / 4];
    for (std::int64_t first = 0; first < s.k; first += kPiece) {
      std::int64_t const columns = std::min<std::int64_t>(kPiece, s.k - first);
      Slab::order8(rows, first, columns, s.k, words);
      std::int32_t const* const x = s.x + first / 4;
      int const steps = static_cast<int>((columns + kTileBytes - 1) / kTileBytes);
      int m = 0;
      for (; m + 2 * kTileRows <= s.m; m += 2 * kTileRows) {
        add<2>(words, steps, x + m * s.stride_x, s.stride_x, sums + m * Slab::kRows);
      }
      for (; m + kTileRows <= s.m; m += kTileRows) {
        add<1>(words, steps, x + m * s.stride_x, s.stride_x, sums + m * Slab::kRows);
      }
      Slab::by_tokens(s.m - m, [&]<int kCount>(int i) __attribute__((always_inline)) {
        One::add<kCount>(words, (columns + 3) / 4, x + (m + i) * s.stride_x, s.stride_x, sums + (m + i) * Slab::kRows);
      });
    }
  }

 private:
  static constexpr int kSumBytes = Slab::kRows * 4, kWordBytes = sizeof(Slab::Column), kStep = kTileBytes / 4;

  // 16 tokens, or twice as many: each tile of the weight that is read then takes part in two products.
  template <int kTiles>
  [[EPILOQ_INT8_TILES]] static void add(Slab::Column const* words, int steps, std::int32_t const* x,
                                        std::int64_t stride, std::int32_t* sums) {
    std::int32_t* const below = sums + kTileRows * Slab::kRows;
    tile_fence();
    _tile_loadd(0, sums, kSumBytes);
    _tile_loadd(1, sums + kTileRows, kSumBytes);
    if constexpr (kTiles == 2) {
      _tile_loadd(2, below, kSumBytes);
      _tile_loadd(3, below + kTileRows, kSumBytes);
    }
    for (int i = 0; i < steps; ++i, words += kStep, x += kStep) {
      _tile_loadd(4, x, stride * 4);
      _tile_loadd(6, words->values, kWordBytes);
      _tile_loadd(7, words->values + kTileRows, kWordBytes);
      _tile_dpbsud(0, 4, 6);
      _tile_dpbsud(1, 4, 7);
      if constexpr (kTiles == 2) {
        _tile_loadd(5, x + kTileRows * stride, stride * 4);
        _tile_dpbsud(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
      }
    }
    _tile_stored(0, sums, kSumBytes);
    _tile_stored(1, sums + kTileRows, kSumBytes);
    if constexpr (kTiles == 2) {
      _tile_stored(2, below, kSumBytes);
      _tile_stored(3, below + kTileRows, kSumBytes);
    }
    tile_fence();
  }
};

}  // namespace epiloq

#endif
