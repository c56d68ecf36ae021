#pragma once

// Many tokens by a slab with AMX: a block's integer sums of 16 tokens at a time, tile after tile of its columns, or one
// that is less deep.

#include "core/host_int8_tiles.h"
#include "ops/online_quant_mm/host_slab.h"

#ifdef EPILOQ_HAS_CLONES
#define EPILOQ_SLAB_TILES gnu::target("arch=x86-64-v4,avx512vnni,amx-tile,amx-int8")

namespace epiloq::ops::online_quant_mm {

struct MultiplySlabInTiles {
  using One = MultiplySlab<VnniBytes>;
  using Slab = One::Slab;
  static constexpr int kFewestColumns = 32;  // of a block

  static bool serves(std::int64_t tokens, int group, bool is_whole) {
    bool const takes_the_rest = __builtin_cpu_supports("avx512vnni");
    return tokens >= kTileRows && group >= kFewestColumns && is_whole && has_int8_tiles() && takes_the_rest;
  }

  // sums [m, kRows]: added to.
  [[EPILOQ_SLAB_TILES]] static void run(SlabByTokens const& s, float* sums) {
    int const depth = std::min(s.group, kTileBytes);
    Tiles const tiles(depth);
    auto* const words = static_cast<Slab::Column*>(s.words);
    Slab::Rows const rows(s.values, s.stride, s.rows);
    for (int first = 0; first < s.blocks; first += s.blocks_at_once()) {
      int const end = std::min(first + s.blocks_at_once(), s.blocks);
      One::order_piece(s, rows, first, end, words);
      int m = 0;
      for (; m + kTileRows <= s.m; m += kTileRows) {
        for (int block = first; block < end; ++block) {
          multiply(s, words + (block - first) * s.group_words(), m, block, depth, sums + m * One::kRows);
        }
      }
      Slab::by_tokens(s.m - m, [&]<int kCount>(int i) __attribute__((always_inline)) {
        One::multiply<kCount>(s, words, m + i, first, end, sums + (m + i) * One::kRows);
      });
    }
  }

 private:
  // A block of 16 tokens from `m` on.
  [[EPILOQ_SLAB_TILES]] static void multiply(SlabByTokens const& s, Slab::Column const* words, int m, int block,
                                             int depth, float* sums) {
    constexpr int kWordBytes = sizeof(Slab::Column), kAtOnce = 8, kRowBytes = sizeof(One::Ints[One::kParts]);
    std::int64_t const stride = static_cast<std::int64_t>(s.blocks) * s.group_words();
    std::int32_t const* x = s.x + m * stride + static_cast<std::int64_t>(block) * s.group_words();
    One::Ints products[kTileRows / kAtOnce][kAtOnce][One::kParts];
    tile_fence();
    _tile_zero(0);
    _tile_zero(1);
    for (int column = 0; column < s.group; column += depth, words += depth / 4, x += depth / 4) {
      _tile_loadd(4, x, stride * 4);
      _tile_loadd(6, words->values, kWordBytes);
      _tile_loadd(7, words->values + kTileRows, kWordBytes);
      _tile_dpbsud(0, 4, 6);
      _tile_dpbsud(1, 4, 7);
    }
    _tile_stored(0, &products[0][0][0], kRowBytes);
    _tile_stored(1, &products[0][0][1], kRowBytes);
    tile_fence();
    for (int i = 0; i < kTileRows / kAtOnce; ++i) {
      One::add<kAtOnce>(s.parameters + static_cast<std::int64_t>(block) * 3 * One::kRows,
                        s.tokens + static_cast<std::int64_t>(m + i * kAtOnce) * s.blocks + block, s.blocks, products[i],
                        sums + i * kAtOnce * One::kRows);
    }
  }
};

}  // namespace epiloq::ops::online_quant_mm

#endif
