#pragma once

// float8 GEMM in bfloat16, which represents float8 exactly, with AVX-512 BF16 or AMX: 16 weight rows in memory order by
// all tokens. A code is converted by table lookups (AVX-512 VBMI), one table of 128 bytes per byte of the bfloat16.

#include <algorithm>
#include <bit>
#include <vector>

#include "core/float8.h"
#include "cpu/gemm/float8.h"
#include "cpu/isa/amx_row_tiles.h"
#include "cpu/isa/avx512_bf16.h"

namespace epiloq {

#ifdef EPILOQ_HAS_CLONES
// A code's magnitude.
template <class Format>
constexpr std::uint16_t bfloat16_of(unsigned code) {
  constexpr unsigned kMantissa = Format::kMantissaBits, kBias = Format::kBias;
  constexpr bool kHasInfinity = kMantissa == 2;
  constexpr float kSmallest = std::bit_cast<float>((128 - kBias - kMantissa) << 23);
  if (kHasInfinity ? code > 0x7c : code == 0x7f) return 0x7fc0;
  if (kHasInfinity && code == 0x7c) return 0x7f80;
  bool const is_normal = code >> kMantissa != 0;
  float const value = is_normal ? std::bit_cast<float>((code << (23 - kMantissa)) + ((127 - kBias) << 23))
                                : static_cast<float>(code) * kSmallest;
  return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
}

// 64 codes and their table lookups.
struct Float8Lookup {
  static constexpr int kCodes = 64;
  using Words = Vectors<16>::Ints;
  typedef std::uint8_t Bytes __attribute__((vector_size(kCodes)));
  struct alignas(kCodes) Table {
    std::uint8_t lower[2 * kCodes], upper[2 * kCodes];
  };

  template <class Format>
  static constexpr Table kTable = [] {
    Table table{};
    for (unsigned code = 0; code < 2 * kCodes; ++code) {
      table.lower[code] = static_cast<std::uint8_t>(bfloat16_of<Format>(code));
      table.upper[code] = static_cast<std::uint8_t>(bfloat16_of<Format>(code) >> 8);
    }
    return table;
  }();

  Bytes lower[2], upper[2];

  [[gnu::always_inline]] explicit Float8Lookup(bool is_e5m2) {
    Table const& table = is_e5m2 ? kTable<E5M2> : kTable<E4M3>;
    load(lower[0], table.lower), load(lower[1], table.lower + kCodes);
    load(upper[0], table.upper), load(upper[1], table.upper + kCodes);
  }

  // As pairs: those of the first two of each four words, and of the others. Every operand's columns are in this order.
  template <class Out>
  [[gnu::always_inline]] void widen(Out& first, Out& second, std::uint8_t const* from) const {
    Bytes codes;
    load(codes, from);
    Bytes low = codes, high = codes;
    Words words[2];
    asm("vpermi2b %2, %1, %0" : "+v"(low) : "v"(lower[0]), "v"(lower[1]));
    asm("vpermi2b %2, %1, %0" : "+v"(high) : "v"(upper[0]), "v"(upper[1]));
    high |= codes & 0x80;
    asm("vpunpcklbw %2, %1, %0" : "=v"(words[0]) : "v"(low), "v"(high));
    asm("vpunpckhbw %2, %1, %0" : "=v"(words[1]) : "v"(low), "v"(high));
    std::memcpy(&first, words, sizeof(Words)), std::memcpy(&second, words + 1, sizeof(Words));
  }
};

// Tokens with the scales of their K blocks of 128 columns.
struct Float8Pairs {
  Line const* x;
  std::int64_t stride;  // lines from one token to the next
  float const* scale;   // [k_block, of_k_block], or null
  std::int64_t of_k_block;
  int count;
};

// The same tokens in AMX tiles.
struct Float8Tiles {
  Line const* x;
  TokenTiles tiles;
  float const* scale;
  std::int64_t of_k_block;

  float const* scale_of(std::int64_t k_block, int tile) const {
    return scale == nullptr ? nullptr : scale + k_block * of_k_block + tile * TokenTiles::kTokens;
  }
};

// The matrix's rows from a row on; past the end the last one is repeated.
template <int kRows>
struct Float8Rows {
  static constexpr int kAhead = 256;  // bytes: hardware prefetchers do not follow as many rows as are read together
  ScaledFloat8 const& w;
  std::int64_t first;
  std::uint8_t const* values[kRows];

  [[gnu::always_inline]] Float8Rows(ScaledFloat8 const& matrix, std::int64_t row) : w(matrix), first(row) {
    for (int r = 0; r < kRows; ++r) values[r] = w.values + index(r) * w.stride;
  }
  std::int64_t index(int r) const { return std::min(first + r, w.rows - 1); }

  // call(rows, column) for each 64 columns of a range, zeros past its end, which is the matrix's or a multiple of them.
  template <class Call>
  [[gnu::always_inline]] void by_codes(std::int64_t begin, std::int64_t end, Call const& call) const {
    constexpr int kCodes = Float8Lookup::kCodes;
    std::int64_t column = begin;
    for (; column + kCodes <= end; column += kCodes) {
      for (int r = 0; r < kRows; ++r) __builtin_prefetch(values[r] + column + kAhead);
      call(values, column, column);
    }
    if (column == end) return;
    std::uint8_t rest[kRows][kCodes] = {};
    std::uint8_t const* of_rest[kRows];
    for (int r = 0; r < kRows; ++r) std::copy_n(values[r] + column, end - column, rest[r]), of_rest[r] = rest[r];
    call(of_rest, 0, column);
  }
};

// Rows by a few tokens in registers: 16 sums at a time. Tokens are there up to a multiple of kMost.
struct RowsByTokens {
  static constexpr int kMost = 4, kSums = 16;
  using Floats = Vectors<16>::Floats;
  using Words = Float8Lookup::Words;

  static std::int64_t lines(std::int64_t columns) { return (columns + 63) / 64 * 2; }  // of a token

  [[gnu::target("arch=x86-64-v4")]] static void arrange(ScaledFloat8 const& x, std::int64_t m, Line* out) {
    Float8Lookup const lookup(x.is_e5m2);
    Float8Rows<1>(x, m).by_codes(0, x.columns,
                                 [&](auto const& from, std::int64_t at, std::int64_t) __attribute__((always_inline)) {
                                   lookup.widen(out[0], out[1], from[0] + at);
                                   out += 2;
                                 });
  }

  // bfloat16, in the order of Float8Lookup::widen.
  static void arrange(FloatRows const& x, std::int64_t m, Line* out) {
    constexpr int kCodes = Float8Lookup::kCodes, kRun = 8;
    auto const* const row = static_cast<std::uint16_t const*>(x.values) + m * x.stride;
    for (std::int64_t column = 0; column < x.columns; column += kCodes, out += 2) {
      std::uint16_t values[kCodes] = {}, in_order[kCodes];
      std::copy_n(row + column, std::min<std::int64_t>(kCodes, x.columns - column), values);
      for (int run = 0; run < kCodes / kRun; ++run) {
        std::copy_n(values + run * kRun, kRun, in_order + run % 2 * kCodes / 2 + run / 2 * kRun);
      }
      std::memcpy(out, in_order, sizeof(in_order));
    }
  }

  template <int kTokens>
  [[gnu::always_inline]] static void block(ScaledFloat8 const& w, std::int64_t row, Float8Pairs const& tokens,
                                           int first, Line* out) {
    constexpr int kRows = kSums / kTokens;
    Float8Lookup const lookup(w.is_e5m2);
    Float8Rows<kRows> const rows(w, row);
    std::int64_t const k_block = w.scale != nullptr || tokens.scale != nullptr ? kFloat8Columns : w.columns;
    Floats total[kSums] = {};
    for (std::int64_t begin = 0, index = 0; begin < w.columns; begin += k_block, ++index) {
      Floats sums[kSums] = {};
      rows.by_codes(begin, std::min(begin + k_block, w.columns),
                    [&](auto const& from, std::int64_t at, std::int64_t column) __attribute__((always_inline)) {
                      Line const* const x = tokens.x + column / 32;
#pragma GCC unroll 16
                      for (int r = 0; r < kRows; ++r) {
                        Words words[2];
                        lookup.widen(words[0], words[1], from[r] + at);
#pragma GCC unroll 4
                        for (int m = 0; m < kTokens; ++m) {
                          add_pairs(sums[m * kRows + r], words[0], x[m * tokens.stride]);
                          add_pairs(sums[m * kRows + r], words[1], x[m * tokens.stride + 1]);
                        }
                      }
                    });
      // Before the sums: gcc 12 repeats the lookups for each sum otherwise, at three times the cost of the products.
      float of_row[kRows], of_token[kTokens];
      for (int r = 0; r < kRows; ++r) of_row[r] = w.scale_at(rows.index(r), index);
      for (int m = 0; m < kTokens; ++m) {
        of_token[m] = tokens.scale == nullptr ? 1.f : tokens.scale[index * tokens.of_k_block + m];
      }
#pragma GCC unroll 16
      for (int i = 0; i < kSums; ++i) total[i] += sums[i] * (of_row[i % kRows] * of_token[i / kRows]);
    }
    sums_of_lanes(total);
    Line sums;
    std::memcpy(&sums, total, sizeof(sums));
    for (int m = 0; m < kTokens; ++m) std::copy_n(sums.values + m * kRows, kRows, out[m].values + first);
  }

  // 16 rows from `row` on; sums [tokens.count up to a multiple of kMost].
  [[gnu::target("arch=x86-64-v4")]] static void run(ScaledFloat8 const& w, std::int64_t row, Float8Pairs const& tokens,
                                                    Line* sums) {
    Float8Pairs some = tokens;
    auto const rows_of = [&]<int kTokens>() __attribute__((always_inline)) {
      constexpr int kRows = kSums / kTokens;
      for (int i = 0; i < kSums && row + i < w.rows; i += kRows) block<kTokens>(w, row + i, some, i, sums);
    };
    for (; some.count > 0; some.count -= kMost, sums += kMost, some.x += kMost * some.stride) {
      if (some.count == 1) {
        rows_of.template operator()<1>();
      } else if (some.count == 2) {
        rows_of.template operator()<2>();
      } else {
        rows_of.template operator()<4>();
      }
      if (some.scale != nullptr) some.scale += kMost;
    }
  }
};

// Rows by tokens with AMX.
struct Float8InTiles {
  using Tiled = RowTiles<RowTileKind::kPairs>;
  using Floats = Vectors<16>::Floats;
  using Words = Float8Lookup::Words;
  static constexpr int kRows = Tiled::kRows, kTokens = Tiled::kTokens;
  // Pairs of lines of a row that are widened at a time (or one more): they stay in L1.
  static constexpr int kOfLine = 32, kTwos = 4;

  static std::int64_t lines(std::int64_t columns) { return (columns + 2 * kOfLine - 1) / (2 * kOfLine) * 2; }

  // A tile of tokens.
  [[gnu::target("arch=x86-64-v4")]] static void arrange(ScaledFloat8 const& x, TokenTiles const& tiles, int tile,
                                                        Line* out) {
    Float8Lookup const lookup(x.is_e5m2);
    Float8Rows<kTokens> const rows(x, tile * kTokens);
    rows.by_codes(0, x.columns,
                  [&](auto const& from, std::int64_t at, std::int64_t column) __attribute__((always_inline)) {
                    Words words[2][kTokens];
                    for (int i = 0; i < kTokens; ++i) {
                      lookup.widen(words[0][i], words[1][i], from[i] + at);
                    }
                    Tiled::arrange(words[0], tiles, tile, column / kOfLine, out);
                    Tiled::arrange(words[1], tiles, tile, column / kOfLine + 1, out);
                  });
  }

  // The same of bfloat16; zeros past the end.
  [[gnu::target("arch=x86-64-v4")]] static void arrange(FloatRows const& x, TokenTiles const& tiles, int tile,
                                                        Line* out) {
    std::vector<Line> rows(kTokens * tiles.lines_of_row);
    for (int i = 0; i < kTokens && tile * kTokens + i < x.rows; ++i) {
      RowsByTokens::arrange(x, tile * kTokens + i, rows.data() + i * tiles.lines_of_row);
    }
    for (std::int64_t line = 0; line < tiles.lines_of_row; ++line) {
      Words words[kTokens];
      for (int i = 0; i < kTokens; ++i) load(words[i], rows[i * tiles.lines_of_row + line].values);
      Tiled::arrange(words, tiles, tile, line, out);
    }
  }

  // 32 rows from `row` on by tiles of tokens from an even one on, as many as hold `count` tokens; sums [tokens] of 32
  // rows, up to whole tiles.
  [[EPILOQ_ROW_TILES]] static void run(ScaledFloat8 const& w, std::int64_t row, Float8Tiles const& tokens, int first,
                                       int count, Line* sums) {
    Tiles const tiles;
    Float8Lookup const lookup(w.is_e5m2);
    Float8Rows<kRows> const rows(w, row);
    Line wide[2 * (kTwos + 1) * kRows];
    int const last = first + (count + kTokens - 1) / kTokens;
    bool const has_scales = w.scale != nullptr || tokens.scale != nullptr;
    std::int64_t const k_block = has_scales ? kFloat8Columns : equal_parts(w.columns, 2 * kOfLine, kTwos);
    if (has_scales || w.columns == 0) std::fill_n(sums, (last - first) * kRows, Line{});
    for (std::int64_t begin = 0, index = 0; begin < w.columns; begin += k_block, ++index) {
      std::int64_t const end = std::min(begin + k_block, w.columns);
      Line* out = wide;
      rows.by_codes(begin, end, [&](auto const& from, std::int64_t at, std::int64_t) __attribute__((always_inline)) {
        for (int r = 0; r < kRows; ++r) lookup.widen(out[r], out[kRows + r], from[r] + at);
        out += 2 * kRows;
      });
      auto const steps = static_cast<int>(lines(end - begin));  // in pairs, which share their 64 columns
      float scale[kRows];
      for (int r = 0; r < kRows && has_scales; ++r) scale[r] = w.scale_at(rows.index(r), index);
      for (int tile = first; tile < last; tile += 2) {
        Line* const to = sums + (tile - first) * kRows;
        Line const* const x = tokens.x + tokens.tiles.start(tile) + begin / kOfLine * tokens.tiles.step(tile);
        bool const two = tile + 1 < tokens.tiles.count();
        if (has_scales) {
          Line products[2 * kRows];
          Tiled::add(wide, steps, x, two, true, products);
          for (int i = 0; i < (two ? 2 : 1); ++i) {
            fold(products + i * kRows, scale, tokens.scale_of(index, tile + i), to + i * kRows);
          }
        } else {
          Tiled::add(wide, steps, x, two, begin == 0, to);
        }
      }
    }
    for (int tile = first; tile < last; ++tile) Tiled::transpose_sums(sums + (tile - first) * kRows);
  }

 private:
  // sums += scale of the row, of_token, products: of 16 tokens; null of_token: ones.
  [[gnu::always_inline]] static void fold(Line const* products, float const* scale, float const* of_token, Line* sums) {
    Floats of_tokens = 1.f - Floats{};
    if (of_token != nullptr) load(of_tokens, of_token);
    for (int r = 0; r < kRows; ++r) {
      Floats product, total;
      load(product, products[r].values), load(total, sums[r].values);
      total += of_tokens * scale[r] * product;
      std::memcpy(sums[r].values, &total, sizeof(total));
    }
  }
};
#endif

}  // namespace epiloq
