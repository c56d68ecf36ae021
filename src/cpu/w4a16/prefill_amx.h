#pragma once

// W4A16 GEMM with AMX for large M, two weight panels at a time. The 64 bytes of rows g and g + 8 in a packed tile
// become lines of bfloat16, 32 columns of a row in the order in which they lie, and tokens come in that order: integers
// less their zero points or E2M1 numbers, which bfloat16 holds exactly. A group's sums are multiplied by its scale, in
// float32. Or, for even larger M, weights rounded with their scales.

#include <array>
#include <bit>

#include "cpu/isa/amx_row_tiles.h"
#include "cpu/isa/avx512_bf16.h"
#include "cpu/w4a16/e2m1.h"
#include "cpu/w4a16/rounded_weights.h"

namespace epiloq::ops::weight_only_mm {

inline constexpr int kOfLine = 32;  // columns, all of one group

// The column, of 32, of each value of a line.
constexpr std::array<std::uint16_t, kOfLine> order_of_line(int bits) {
  std::array<std::uint16_t, kOfLine> order{};
  for (int i = 0; i < kOfLine; ++i) {
    int const t = i / 8, word = i / 2 % 4, second = i % 2;
    int const of_word = bits == 8 ? word % 2 * 8 + second : word % 2 + 8 * second;
    order[i] = static_cast<std::uint16_t>(word / 2 * 16 + of_word + 2 * t);
  }
  return order;
}

#ifdef EPILOQ_HAS_CLONES
// Tokens as sums of so many of bfloat16.
struct TokenParts {
  Line const* x;
  TokenTiles tiles;
  int parts;
};

struct PanelsInTiles {
  Weight const& weight;
  PackedPanel const* panels[2];
  int const* groups;  // where the parameters of each line's columns begin
  bool rounds, is_fp4;
};

// Small numbers as bfloat16, by bytes: integers from -32 to 31, or E2M1 numbers by their codes. 64 become two lines.
struct SmallNumbers {
  typedef std::int8_t Bytes __attribute__((vector_size(64)));
  struct alignas(64) Table {
    std::uint8_t lower[64], upper[64];
  };
  template <bool kIsFp4>
  static constexpr Table kTable = [] {
    Table table{};
    for (int byte = 0; byte < 64; ++byte) {
      float const integer = static_cast<float>(byte < 32 ? byte : byte - 64);
      auto const bits = std::bit_cast<std::uint32_t>(kIsFp4 ? kE2m1[byte % 16] : integer);
      table.lower[byte] = static_cast<std::uint8_t>(bits >> 16);
      table.upper[byte] = static_cast<std::uint8_t>(bits >> 24);
    }
    return table;
  }();
  Bytes lower, upper;

  [[gnu::always_inline]] explicit SmallNumbers(bool is_fp4) {
    Table const& table = is_fp4 ? kTable<true> : kTable<false>;
    load(lower, table.lower), load(upper, table.upper);
  }
  // Bytes 0 to 7 of each 16, and the others.
  [[gnu::always_inline]] void widen(Line& first, Line& second, Bytes const& values) const {
    Bytes low, high, lines[2];
    asm("vpermb %2, %1, %0" : "=v"(low) : "v"(values), "v"(lower));
    asm("vpermb %2, %1, %0" : "=v"(high) : "v"(values), "v"(upper));
    asm("vpunpcklbw %2, %1, %0" : "=v"(lines[0]) : "v"(low), "v"(high));
    asm("vpunpckhbw %2, %1, %0" : "=v"(lines[1]) : "v"(low), "v"(high));
    std::memcpy(&first, lines, sizeof(Line)), std::memcpy(&second, lines + 1, sizeof(Line));
  }
};

struct MultiplyInTiles {
  using Tiled = RowTiles<RowTileKind::kPairs>;
  using Floats = Vectors<16>::Floats;
  using Ints = Vectors<16>::Ints;
  using Bytes = SmallNumbers::Bytes;
  static constexpr int kRows = Tiled::kRows, kTokens = Tiled::kTokens;
  // Columns that are widened at a time: they stay in L1. Of rounded ones equal parts.
  static constexpr int kAtOnce = 256, kUnit = 64;
  static constexpr int kTileRowBytes = 64;

  // 16 tokens' rows of bfloat16, up to whole tiles of the weight, in the order of its lines.
  [[gnu::target("arch=x86-64-v4")]] static void arrange(std::uint16_t const* rows, std::int64_t stride, int bits,
                                                        TokenTiles const& tiles, int tile, Line* out) {
    typedef std::uint16_t Shorts __attribute__((vector_size(64)));
    auto const order = order_of_line(bits);
    Shorts places;
    load(places, order.data());
    for (std::int64_t line = 0; line < tiles.lines_of_row; ++line) {
      Tiled::Words words[kTokens];
#pragma GCC unroll 16
      for (int i = 0; i < kTokens; ++i) {
        Shorts values;
        load(values, rows + i * stride + line * kOfLine);
        words[i] = (Tiled::Words)__builtin_shuffle(values, places);
      }
      Tiled::arrange(words, tiles, tile, line, out);
    }
  }

  // 4 bits, 64 columns: rows g in the lower halves of bytes, g + 8 in the higher.
  [[gnu::always_inline]] static void widen4(std::uint8_t const* q, std::uint64_t const* zero, std::uint64_t const* next,
                                            SmallNumbers const& numbers, Line* out) {
    typedef std::uint64_t Quads __attribute__((vector_size(64)));
#pragma GCC unroll 8
    for (int g = 0; g < kPanelRows / 2; ++g) {
      Ints pair;
      load(pair, q + g * kTileRowBytes);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        int const row = g + half * kPanelRows / 2;
        std::uint64_t const a = zero[parameter_of(row)], b = next[parameter_of(row)];
        Bytes const zeros = zero == next ? (Bytes)(a - Quads{}) : (Bytes)Quads{a, b, a, b, a, b, a, b};
        numbers.widen(out[row], out[kRows + row], (Bytes)((half == 0 ? pair : pair >> 4) & 0x0f0f0f0f) - zeros);
      }
    }
  }

  // 8 bits, 32 columns: twos of row g, then of g + 8, in each word.
  [[gnu::always_inline]] static void widen8(std::uint8_t const* q, float const* zero, Line* out) {
#pragma GCC unroll 8
    for (int g = 0; g < kPanelRows / 2; ++g) {
      Ints words;
      load(words, q + g * kTileRowBytes);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        int const row = g + half * kPanelRows / 2;
        float const of_row = zero[parameter_of(row)];
        Ints const even = (Ints)(__builtin_convertvector(words >> (16 * half) & 0xff, Floats) - of_row);
        Ints const odd = (Ints)(__builtin_convertvector(words >> (16 * half + 8) & 0xff, Floats) - of_row);
        Ints pairs;
        pair_of(pairs, even, odd);
        std::memcpy(out + row, &pairs, sizeof(pairs));
      }
    }
  }

  // Columns `begin` to `end` of a panel, to every other 16 lines of `out`.
  [[gnu::always_inline]] static void widen(PanelsInTiles const& s, int panel, int begin, int end, Line* out) {
    PackedPanel const& p = *s.panels[panel];
    SmallNumbers const numbers(s.is_fp4);
    int const bits = read_bits(s.weight.bits), columns = depth(bits), tile_bytes = 8 * kTileRowBytes;
    std::uint8_t const* q = p.q + std::int64_t{begin} / columns * tile_bytes;
    for (int column = begin; column < end; column += columns, out += columns / kOfLine * kRows, q += tile_bytes) {
      int const* const groups = s.groups + column / kOfLine;
      if (bits == 8) {
        s.rounds ? RoundedWeights::widen8(q, p, groups[0], out) : widen8(q, &p.zero[groups[0]], out);
      } else if (s.rounds) {
        RoundedWeights::widen4(q, p, s.is_fp4, groups[0], groups[1], kRows, out);
      } else {
        widen4(q, &p.zero_bytes[groups[0]], &p.zero_bytes[groups[1]], numbers, out);
      }
    }
  }

  // 32 rows by tiles of tokens from an even one on, as many as hold `count` tokens; sums [tokens] of 32 rows, up to
  // whole tiles.
  [[EPILOQ_ROW_TILES]] static void run(PanelsInTiles const& s, TokenParts const& tokens, int first, int count,
                                       Line* sums) {
    Tiles const tiles;
    Weight const& w = s.weight;
    Line rows[(kAtOnce + kUnit) / kOfLine * kRows], products[2 * kRows];
    int const last = first + (count + kTokens - 1) / kTokens;
    if (!s.rounds || w.k == 0) std::fill_n(sums, (last - first) * kRows, Line{});
    int const at_once = s.rounds ? equal_parts(w.k, kUnit, kAtOnce / kUnit) : kAtOnce;
    for (int begin = 0; begin < w.k; begin += at_once) {
      int const end = std::min(begin + at_once, w.k);
      widen(s, 0, begin, end, rows), widen(s, 1, begin, end, rows + kPanelRows);
      for (int tile = first; tile < last; tile += 2) {
        bool const two = tile + 1 < tokens.tiles.count();
        Line const* const x = tokens.x + tokens.tiles.start(tile);
        if (s.rounds) {
          Tiled::add(rows, (end - begin + kOfLine - 1) / kOfLine, x + begin / kOfLine * tokens.tiles.step(tile), two,
                     begin == 0, sums + (tile - first) * kRows);
          continue;
        }
        for (int column = begin, of_group = 0; column < end; column += of_group) {
          of_group = std::min(end - column, w.group - column % w.group);
          Tiled::add(rows + (column - begin) / kOfLine * kRows, (of_group + kOfLine - 1) / kOfLine,
                     x + column / kOfLine * tokens.tiles.step(tile), two, true, products, tokens.parts,
                     tokens.tiles.size());
          fold(products, s, s.groups[column / kOfLine], two ? 2 : 1, sums + (tile - first) * kRows);
        }
      }
    }
    for (int tile = first; tile < last; ++tile) Tiled::transpose_sums(sums + (tile - first) * kRows);
  }

 private:
  // sums += the rows' scales of a group, products: of so many times 16 tokens.
  [[gnu::always_inline]] static void fold(Line const* products, PanelsInTiles const& s, int group, int count,
                                          Line* sums) {
    for (int panel = 0; panel < 2; ++panel) {
      float const* const scales = &s.panels[panel]->scale[group];
      for (int tile = 0; tile < count; ++tile) {
        int const at = tile * kRows + panel * kPanelRows;
#pragma GCC unroll 16
        for (int r = 0; r < kPanelRows; ++r) {
          Floats product, total;
          load(product, products[at + r].values), load(total, sums[at + r].values);
          total += scales[parameter_of(r)] * product;
          std::memcpy(sums[at + r].values, &total, sizeof(total));
        }
      }
    }
  }
};
#endif

}  // namespace epiloq::ops::weight_only_mm
