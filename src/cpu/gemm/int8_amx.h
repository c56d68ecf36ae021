#pragma once

// int8 rows by int8 tokens with AMX: exact sums.

#include "cpu/gemm/int8.h"
#include "cpu/isa/amx_row_tiles.h"

#ifdef EPILOQ_HAS_CLONES

namespace epiloq {

inline bool has_int8_tiles() { return has_tiles(TileKind::kInt8); }

struct Int8InTiles {
  using Tiled = RowTiles<RowTileKind::kBytes>;
  static constexpr int kRows = Tiled::kRows, kTokens = Tiled::kTokens;
  static constexpr int kOfLine = sizeof(Line);
  // Lines of a row that are arranged in tiles at a time (or one more): they stay in L1.
  static constexpr int kLines = 8;

  static std::int64_t lines(std::int64_t columns) { return (columns + kOfLine - 1) / kOfLine; }

  // A tile of tokens.
  [[gnu::target("arch=x86-64-v4")]] static void arrange(Int8Product const& p, TokenTiles const& tiles, int tile,
                                                        Line* out) {
    for (int column = 0; column < p.k; column += kOfLine) {
      Tiled::Words words[kTokens] = {};
      for (int i = 0; i < std::min(kTokens, p.m - tile * kTokens); ++i) {
        copy(words + i, p.a + (std::int64_t{tile} * kTokens + i) * p.stride_a + column, p.k - column);
      }
      Tiled::arrange(words, tiles, tile, column / kOfLine, out);
    }
  }

  // 32 rows from `row` on by tiles of tokens from an even one on, as many as hold `count` tokens; sums [tokens] of 32
  // rows, up to whole tiles.
  [[EPILOQ_ROW_TILES]] static void run(Int8Product const& p, int row, Line const* x, TokenTiles const& tokens,
                                       int first, int count, Line* sums) {
    Tiles const tiles;
    Line rows[(kLines + 1) * kRows];
    int const last = first + (count + kTokens - 1) / kTokens;
    if (p.k == 0) std::fill_n(sums, (last - first) * kRows, Line{});
    int const at_once = equal_parts(p.k, kOfLine, kLines);
    for (int begin = 0; begin < p.k; begin += at_once) {
      int const end = std::min(begin + at_once, p.k), steps = (end - begin + kOfLine - 1) / kOfLine;
      for (int r = 0; r < kRows; ++r) {
        std::int8_t const* const of_row = p.b + std::min(row + r, p.n - 1) * p.stride_b;
        // Prefetches the next line of this row, or of the row 32 rows on. (Hardware prefetchers do not follow as many
        // rows as are read together.)
        std::int8_t const* const next =
            end < p.k ? of_row + end : p.b + std::min(row + kRows + r, p.n - 1) * p.stride_b;
        for (int i = 0; i < steps; ++i) {
          __builtin_prefetch(next + i * kOfLine, 0, 2);
          copy(rows + i * kRows + r, of_row + begin + i * kOfLine, end - begin - i * kOfLine);
        }
      }
      for (int tile = first; tile < last; tile += 2) {
        Line const* const here = x + tokens.start(tile) + begin / kOfLine * tokens.step(tile);
        Tiled::add(rows, steps, here, tile + 1 < tokens.count(), begin == 0, sums + (tile - first) * kRows);
      }
    }
    for (int tile = first; tile < last; ++tile) Tiled::transpose_sums(sums + (tile - first) * kRows);
  }

 private:
  // A line; past the end of a row zeros.
  [[gnu::always_inline]] static void copy(void* to, std::int8_t const* from, int left) {
    if (left >= kOfLine) {
      std::memcpy(to, from, kOfLine);
    } else {
      Line line{};
      std::memcpy(&line, from, left);
      std::memcpy(to, &line, sizeof(line));
    }
  }
};

}  // namespace epiloq

#endif
