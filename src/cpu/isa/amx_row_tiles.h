#pragma once

// Rows of a matrix by tokens with AMX: two tiles of 16 rows in memory order by one or two tiles of 16 tokens, whose
// words are interleaved. The matrix is not transposed, and each loaded tile is used in two products.

#include <algorithm>

#include "cpu/isa/amx.h"
#include "cpu/isa/vectors.h"

namespace epiloq {

inline bool has_pair_tiles() {
#ifdef EPILOQ_HAS_CLONES
  return has_tiles(TileKind::kBFloat16);
#else
  return false;
#endif
}

// Tokens in tiles: [two tiles, or the last one][line of a row of the matrix][tile][word][token].
struct TokenTiles {
  static constexpr int kTokens = 16, kWords = 16;
  std::int64_t lines_of_row;  // of 64 bytes, of a row of the matrix
  int tokens;

  int count() const { return (tokens + kTokens - 1) / kTokens; }
  std::int64_t size() const { return count() * lines_of_row * kWords; }  // in lines
  // From one line of a row to the next, and where a tile's first one begins.
  int step(int tile) const { return (tile | 1) < count() ? 2 * kWords : kWords; }
  std::int64_t start(int tile) const { return tile / 2 * 2 * lines_of_row * kWords + (tile % 2) * kWords; }
};

// Columns of a row that are converted to tiles at a time: `all` columns in equal parts of whole units, at most
// `usual` + 1 units each. (With a short last part, sums would be read and written for few products.)
inline int equal_parts(std::int64_t all, int unit, int usual) {
  std::int64_t const units = (all + unit - 1) / unit, parts = std::max<std::int64_t>((units + usual - 2) / usual, 1);
  return static_cast<int>((units + parts - 1) / parts) * unit;
}

#ifdef EPILOQ_HAS_CLONES
#define EPILOQ_ROW_TILES gnu::target("arch=x86-64-v4,amx-tile,amx-bf16,amx-int8")

// Which products: pairs of bfloat16 added up in float32, or four bytes in int32.
enum class RowTileKind { kPairs, kBytes };

template <RowTileKind kKind>
struct RowTiles {
  static constexpr int kRows = 2 * kTileRows, kTokens = TokenTiles::kTokens;
  using Words = Vectors<16>::Ints;

  // 16 tokens' words of a line, transposed, to tile `tile`.
  [[gnu::always_inline]] static void arrange(Words (&words)[kTokens], TokenTiles const& tiles, int tile,
                                             std::int64_t line, Line* out) {
    transpose(words);
    std::memcpy(out + tiles.start(tile) + line * tiles.step(tile), words, sizeof(words));
  }

  // Adds the products of `rows` [steps][two tiles][16 lines] by the tokens' [steps][one or two tiles][16 lines] to the
  // sums, [32 rows] of 16 tokens for each tile of tokens; stores them instead if `fresh`. Tokens that are split into a
  // sum of bfloat16 values have `parts` parts, `of_part` lines apart.
  template <bool kTwo>
  [[gnu::always_inline]] static void add(Line const* rows, int steps, Line const* x, bool fresh, Line* sums, int parts,
                                         std::int64_t of_part) {
    tile_fence();
    if (fresh) {
      zero<0>(), zero<1>(), zero<2>(), zero<3>();
    } else {
      load<0>(sums), load<1>(sums + kTileRows);
      if constexpr (kTwo) load<2>(sums + kRows), load<3>(sums + kRows + kTileRows);
    }
    for (int i = 0; i < steps; ++i, rows += kRows, x += kTwo ? 2 * kTokens : kTokens) {
      load<4>(rows), load<5>(rows + kTileRows);
      for (int part = 0; part < parts; ++part) {
        Line const* const tokens = x + part * of_part;
        load<6>(tokens);
        multiply<0, 4, 6>();
        multiply<1, 5, 6>();
        if constexpr (kTwo) {
          load<7>(tokens + kTokens);
          multiply<2, 4, 7>();
          multiply<3, 5, 7>();
        }
      }
    }
    store<0>(sums), store<1>(sums + kTileRows);
    if constexpr (kTwo) store<2>(sums + kRows), store<3>(sums + kRows + kTileRows);
    tile_fence();
  }
  [[EPILOQ_ROW_TILES]] static void add(Line const* rows, int steps, Line const* x, bool two, bool fresh, Line* sums,
                                       int parts = 1, std::int64_t of_part = 0) {
    two ? add<true>(rows, steps, x, fresh, sums, parts, of_part)
        : add<false>(rows, steps, x, fresh, sums, parts, of_part);
  }

  // Sums of a tile of tokens, [32 rows] of 16 tokens, to [16 tokens] of 32 rows.
  [[gnu::always_inline]] static void transpose_sums(Line* sums) {
    Words parts[2][kTokens];
    std::memcpy(parts, sums, sizeof(parts));
    transpose(parts[0]), transpose(parts[1]);
    for (int i = 0; i < kTokens; ++i) {
      std::memcpy(sums + 2 * i, parts[0] + i, sizeof(Words)),
          std::memcpy(sums + 2 * i + 1, parts[1] + i, sizeof(Words));
    }
  }

 private:
  // (By number: the intrinsics are macros that require literal tile numbers.)
  template <int kTile>
  [[gnu::always_inline]] static void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
  }
  template <int kTile>
  [[gnu::always_inline]] static void load(Line const* from) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(sizeof(Line)), "i"(kTile));
  }
  template <int kTile>
  [[gnu::always_inline]] static void store(Line* to) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(sizeof(Line)), "i"(kTile) : "memory");
  }
  template <int kSum, int kRow, int kToken>
  [[gnu::always_inline]] static void multiply() {
    if constexpr (kKind == RowTileKind::kPairs) {
      asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kRow), "i"(kToken));
    } else {
      asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kRow), "i"(kToken));
    }
  }
};
#endif

}  // namespace epiloq
