#pragma once

// 32 weight rows by quantised tokens with AMX: integer sums per quantisation block in AMX tiles, then the scales.

#include "cpu/gemm/int8_amx.h"
#include "cpu/online_quant/online_quant_panel.h"

namespace epiloq::ops::online_quant_mm {

// Columns that are multiplied by a line of 64 bytes: a block has whole ones.
constexpr int columns_of_line(int group) { return group % 64 == 0 ? 64 : 32; }

#ifdef EPILOQ_HAS_CLONES
struct BlocksInTiles {
  std::int8_t const* values;
  std::int64_t stride;  // bytes
  int rows, bits;
  int k, group;
  float const* parameters;  // [blocks, 3, 32]: scale, total, offset

  int blocks() const { return (k + group - 1) / group; }
  int lines_of_block() const { return group / columns_of_line(group); }
};

struct TokenBlocks {
  Line const* x;  // lines of a block, filled up with zeros, then the next block's
  TokenTiles tiles;
  float const* parameters;  // [blocks, 3, tokens up to whole tiles]: scale, offset, scaled sum

  std::int64_t up_to() const { return std::int64_t{tiles.count()} * TokenTiles::kTokens; }
};

struct MultiplyBlocksInTiles {
  using Tiled = RowTiles<RowTileKind::kBytes>;
  using Floats = Vectors<16>::Floats;
  using Ints = Vectors<16>::Ints;
  static constexpr int kRows = Tiled::kRows, kTokens = Tiled::kTokens;
  static constexpr int kLines = 8;  // of a row that are made at a time: they stay in L1
  static constexpr int kFewest = 9;

  static bool supports(std::int64_t tokens, int group) {
    return tokens >= kFewest && group % 32 == 0 && group / columns_of_line(group) <= kLines && has_int8_tiles();
  }

  // A tile of tokens: [16][columns up to whole blocks], zeros past a token's last.
  [[gnu::target("arch=x86-64-v4")]] static void arrange(std::int8_t const* rows, std::int64_t stride, int group,
                                                        TokenTiles const& tiles, int tile, Line* out) {
    columns_of_line(group) == 64 ? arrange<64>(rows, stride, tiles, tile, out)
                                 : arrange<32>(rows, stride, tiles, tile, out);
  }
  template <int kOfLine>
  [[gnu::always_inline]] static void arrange(std::int8_t const* rows, std::int64_t stride, TokenTiles const& tiles,
                                             int tile, Line* out) {
    for (std::int64_t line = 0; line < tiles.lines_of_row; ++line) {
      Tiled::Words words[kTokens] = {};
      for (int i = 0; i < kTokens; ++i) std::memcpy(words + i, rows + i * stride + line * kOfLine, kOfLine);
      Tiled::arrange(words, tiles, tile, line, out);
    }
  }

  // 32 rows by tiles of tokens from an even one on, as many as hold `count` tokens; sums [tokens] of 32 rows, up to
  // whole tiles.
  [[EPILOQ_ROW_TILES]] static void run(BlocksInTiles const& s, TokenBlocks const& tokens, int first, int count,
                                       Line* sums) {
    Tiles const tiles;
    Line rows[kLines * kRows] = {}, products[2 * kRows];
    int const last = first + (count + kTokens - 1) / kTokens, of_block = s.lines_of_block();
    int const at_once = kLines / of_block;  // blocks
    std::fill_n(sums, (last - first) * kRows, Line{});
    for (int begin = 0; begin < s.blocks(); begin += at_once) {
      int const end = std::min(begin + at_once, s.blocks());
      widen(s, begin, end, rows);
      for (int tile = first; tile < last; tile += 2) {
        bool const two = tile + 1 < tokens.tiles.count();
        for (int block = begin; block < end; ++block) {
          int const line = block * of_block, columns = std::min(s.group, s.k - block * s.group);
          int const steps = (columns + columns_of_line(s.group) - 1) / columns_of_line(s.group);
          Line const* const x = tokens.x + tokens.tiles.start(tile) + line * tokens.tiles.step(tile);
          Tiled::add(rows + (line - begin * of_block) * kRows, steps, x, two, true, products);
          for (int i = 0; i < (two ? 2 : 1); ++i) {
            fold(products + i * kRows, s.parameters + block * 3 * kRows, tokens, block, tile + i,
                 sums + (tile + i - first) * kRows);
          }
        }
      }
    }
    for (int tile = first; tile < last; ++tile) Tiled::transpose_sums(sums + (tile - first) * kRows);
  }

 private:
  // 4 bits: byte b of 16 has the values b and b + 16.
  template <int kOfLine>
  [[gnu::always_inline]] static void widen4(std::int8_t const* from, Line& out) {
    typedef std::int64_t Quads __attribute__((vector_size(64)));
    typedef std::uint16_t Shorts __attribute__((vector_size(64)));
    constexpr Quads kHigher = {0, 0, 0x0004000400040004, 0x0004000400040004,
                               0, 0, 0x0004000400040004, 0x0004000400040004};
    Quads twice;
    if constexpr (kOfLine == 64) {
      typedef std::int64_t Half __attribute__((vector_size(32)));
      Half bytes;
      std::memcpy(&bytes, from, sizeof(bytes));
      twice = __builtin_shufflevector(bytes, bytes, 0, 1, 0, 1, 2, 3, 2, 3);
    } else {
      typedef std::int64_t Quarter __attribute__((vector_size(16)));
      Quarter bytes;
      std::memcpy(&bytes, from, sizeof(bytes));
      twice = __builtin_shufflevector(bytes, Quarter{}, 0, 1, 0, 1, 2, 2, 2, 2);
    }
    Ints const values = (Ints)((Shorts)twice >> (Shorts)kHigher) & 0x0f0f0f0f;
    typedef std::int8_t Bytes __attribute__((vector_size(64)));
    Bytes const centred = ((Bytes)values ^ 8) - 8;
    std::memcpy(&out, &centred, sizeof(out));
  }

  // Blocks `begin` to `end` of the rows, the last one again past it, in [lines][32 rows].
  [[gnu::always_inline]] static void widen(BlocksInTiles const& s, int begin, int end, Line* out) {
    columns_of_line(s.group) == 64 ? widen<64>(s, begin, end, out) : widen<32>(s, begin, end, out);
  }
  template <int kOfLine>
  [[gnu::always_inline]] static void widen(BlocksInTiles const& s, int begin, int end, Line* out) {
    int const of_block = s.group / kOfLine;
    int const lines = (std::min(end * s.group, s.k) - begin * s.group + kOfLine - 1) / kOfLine;
    for (int r = 0; r < kRows; ++r) {
      std::int8_t const* const row = s.values + std::min(r, s.rows - 1) * s.stride;
      for (int i = 0; i < lines; ++i) {
        std::int8_t const* const from = row + std::int64_t{begin * of_block + i} * kOfLine * s.bits / 8;
        // (Hardware does not follow as many rows as are read together.)
        __builtin_prefetch(from + kLines * sizeof(Line));
        if (s.bits == 4) {
          widen4<kOfLine>(from, out[i * kRows + r]);
        } else {
          std::memcpy(out + i * kRows + r, from, kOfLine);
        }
      }
    }
  }

  // A block's products of a tile of tokens, scaled, onto sums.
  [[gnu::always_inline]] static void fold(Line const* products, float const* of_rows, TokenBlocks const& tokens,
                                          int block, int tile, Line* sums) {
    float const* const of_tokens = tokens.parameters + block * 3 * tokens.up_to() + tile * kTokens;
    Floats scale, offset, scaled_sum;
    load(scale, of_tokens), load(offset, of_tokens + tokens.up_to()), load(scaled_sum, of_tokens + 2 * tokens.up_to());
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      Ints product;
      Floats total;
      load(product, products[r].values), load(total, sums[r].values);
      total += __builtin_convertvector(product, Floats) * of_rows[r] * scale + of_rows[2 * kRows + r] * scaled_sum;
      total += of_rows[kRows + r] * offset;
      std::memcpy(sums[r].values, &total, sizeof(total));
    }
  }
};
#endif

}  // namespace epiloq::ops::online_quant_mm
