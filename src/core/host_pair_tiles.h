#pragma once

// Products of bfloat16 with AMX: up to 64 tokens at a time by 16 rows of a weight, a word of two columns of each row
// side by side. Sums are float32; subnormal numbers count as 0, as in host_pairs.h. Tokens of float16 and float32 are
// sums of two and three of bfloat16, eight bits each.

#include <algorithm>

#include "core/host_pairs.h"
#include "core/host_tiles.h"

namespace epiloq {

// Columns of a tile, and how tokens lie for tiles: rows as in memory, zeros up to whole tiles.
inline constexpr int kTilePairs = 16, kTileColumns = 2 * kTilePairs;

inline bool has_pair_tiles() {
#ifdef EPILOQ_HAS_CLONES
  return has_tiles(TileKind::kBFloat16);
#else
  return false;
#endif
}

#ifdef EPILOQ_HAS_CLONES
#define EPILOQ_PAIR_TILES gnu::target("arch=x86-64-v4,amx-tile,amx-bf16")

struct TokensOfTiles {
  std::uint16_t const* x;
  std::int64_t stride;
  int count;  // rows up to a multiple of kTileRows are there
  int parts = 1;
  std::int64_t of_part = 0;  // from one part to the next
};

// Groups of columns that follow one another: of so many tiles, by one scale a row.
struct PairGroup {
  int steps;
  Line scale;
};

struct PairTiles {
  using Floats = Vectors<16>::Floats;

  // sums[m] += scale (x[m] . pairs) of each group.
  [[EPILOQ_PAIR_TILES]] static void add(Line const* pairs, PairGroup const* groups, int count, TokensOfTiles tokens,
                                        Line* sums) {
    // Where a group has few products, adding up its sums would take longer than those.
    int const few = tokens.parts == 1 ? 1 : 4;  // tiles of columns: of a part each, 1.4 times as fast as below
    if (groups[0].steps <= few) return add_by_tokens(pairs, groups, count, tokens, sums);
    for (int g = 0; g < count; ++g) {
      add(pairs, groups[g].steps, tokens, groups[g].scale, nullptr, sums);
      pairs += groups[g].steps * kTilePairs, tokens.x += groups[g].steps * kTileColumns;
    }
  }

  // sums[m] += scale of_token[m] (x[m] . pairs), of `steps` tiles of columns; null of_token: ones.
  [[EPILOQ_PAIR_TILES]] static void add(Line const* pairs, int steps, TokensOfTiles const& tokens, Line const& scale,
                                        float const* of_token, Line* sums) {
    int m = 0;
    for (; m + 2 * kTileRows < tokens.count; m += 4 * kTileRows) {
      some<4>(pairs, steps, tokens, m, scale, of_token, sums);
    }
    for (; m < tokens.count; m += kTileRows) some<1>(pairs, steps, tokens, m, scale, of_token, sums);
  }

 private:
  // 16 tokens after the other: their sums stay in registers from group to group.
  [[EPILOQ_PAIR_TILES]] static void add_by_tokens(Line const* pairs, PairGroup const* groups, int count,
                                                  TokensOfTiles const& tokens, Line* sums) {
    for (int m = 0; m < tokens.count; m += kTileRows) {
      int const rows = std::min(kTileRows, tokens.count - m);
      Line some[kTileRows];
      std::memcpy(some, sums + m, rows * sizeof(Line));
      add_to_tile(pairs, groups, count, tokens, tokens.x + m * tokens.stride, some);
      std::memcpy(sums + m, some, rows * sizeof(Line));
    }
  }

  [[EPILOQ_PAIR_TILES]] static void add_to_tile(Line const* pairs, PairGroup const* groups, int count,
                                                TokensOfTiles const& tokens, std::uint16_t const* x, Line* sums) {
    Floats total[kTileRows];
    std::memcpy(total, sums, sizeof(total));
    for (int g = 0; g < count; ++g) {
      Line products[kTileRows];
      tile_fence();
      _tile_zero(0);
      for (int i = 0; i < groups[g].steps; ++i, pairs += kTilePairs, x += kTileColumns) {
        _tile_loadd(7, pairs, sizeof(Line));
        for (int part = 0; part < tokens.parts; ++part) {
          _tile_loadd(4, x + part * tokens.of_part, tokens.stride * 2);
          _tile_dpbf16ps(0, 4, 7);
        }
      }
      _tile_stored(0, products, sizeof(Line));
      tile_fence();
      Floats scale;
      load(scale, groups[g].scale.values);
#pragma GCC unroll 16
      for (int m = 0; m < kTileRows; ++m) {
        Floats product;
        load(product, products[m].values);
        total[m] += scale * product;
      }
    }
    std::memcpy(sums, total, sizeof(total));
  }

  // (Tiles of tokens past the last are the last one again.)
  template <int kTiles>
  [[EPILOQ_PAIR_TILES]] static void some(Line const* pairs, int steps, TokensOfTiles const& tokens, int first,
                                         Line const& scale, float const* of_token, Line* sums) {
    std::int64_t const bytes = tokens.stride * 2;
    int const last = (tokens.count - 1) / kTileRows * kTileRows;
    auto const tile = [&](int i) { return tokens.x + std::min(first + i * kTileRows, last) * tokens.stride; };
    std::uint16_t const *x0 = tile(0), *x1 = tile(1), *x2 = tile(2), *x3 = tile(3);
    Line products[kTiles * kTileRows];
    tile_fence();
    _tile_zero(0);
    if constexpr (kTiles == 4) {
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int i = 0; i < steps; ++i, pairs += kTilePairs) {
      _tile_loadd(7, pairs, sizeof(Line));
      std::int64_t at = i * kTileColumns;
      for (int part = 0; part < tokens.parts; ++part, at += tokens.of_part) {
        _tile_loadd(4, x0 + at, bytes);
        _tile_dpbf16ps(0, 4, 7);
        if constexpr (kTiles == 4) {
          _tile_loadd(5, x1 + at, bytes);
          _tile_dpbf16ps(1, 5, 7);
          _tile_loadd(4, x2 + at, bytes);
          _tile_dpbf16ps(2, 4, 7);
          _tile_loadd(5, x3 + at, bytes);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
    }
    _tile_stored(0, products, sizeof(Line));
    if constexpr (kTiles == 4) {
      _tile_stored(1, products + kTileRows, sizeof(Line));
      _tile_stored(2, products + 2 * kTileRows, sizeof(Line));
      _tile_stored(3, products + 3 * kTileRows, sizeof(Line));
    }
    tile_fence();
    Floats of_rows;
    load(of_rows, scale.values);
    int const end = std::min(kTiles * kTileRows, tokens.count - first);
    for (int m = 0; m < end; ++m) {
      Floats sum, total;
      load(sum, products[m].values), load(total, sums[first + m].values);
      total += (of_token == nullptr ? of_rows : of_rows * of_token[first + m]) * sum;
      std::memcpy(sums[first + m].values, &total, sizeof(total));
    }
  }
};
#endif

}  // namespace epiloq
