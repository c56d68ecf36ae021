#pragma once

// Weight panel by quantised tokens, one quantisation block along K after the other.

#include "cpu/common/panel.h"

namespace epiloq::ops::online_quant_mm {

// Columns reordered at a time, at least: they stay in L1.
inline constexpr int kKBlock = 256;

// Offset that makes 8-bit or 4-bit integers unsigned.
constexpr int zero_of(int bits) { return bits == 8 ? 128 : 8; }

struct TokenBlock {
  float scale, offset, scaled_sum;
  std::int32_t correction;  // of integer sums: minus the zero times the sum of the token's integers
};

struct PanelByTokens {
  std::int8_t const* values;
  std::int64_t stride;  // bytes
  int rows, bits;
  int k, group, blocks;
  float const* parameters;   // [blocks, 3, kRows]: scale, total, offset
  std::int32_t const* x;     // [m, words of a token], blocks filled up to whole words
  TokenBlock const* tokens;  // [m, blocks]
  int m;
  void* words;  // columns(…) columns

  int group_words() const { return (group + 3) / 4; }
  int words_of(int block) const { return (std::min(group, k - block * group) + 3) / 4; }
  int blocks_at_once() const { return std::max(1, kKBlock / group); }
  // Whether K blocks begin and end with a unit of a row, at 4 bits as well.
  bool is_whole() const { return (group % 4 == 0 && kKBlock % group == 0) || group % 128 == 0; }
  // Columns of a K block, padded to whole units.
  std::int64_t columns() const { return (static_cast<std::int64_t>(blocks_at_once()) * group_words() + 31) / 32 * 32; }
};

template <class Bytes>
struct MultiplyPanel {
  using Panel = BytePanel<Bytes>;
  using Column = typename Panel::Column;
  using Ints = typename Panel::Ints;
  using Floats = typename Panel::Floats;
  static constexpr int kLanes = Panel::kLanes, kParts = Panel::kParts, kRows = Panel::kRows;

  // 4-bit columns of a K block of whole units. Byte b of 16 has the values b and b + 16.
  [[gnu::always_inline]] static void order4(typename Panel::Rows const& rows, int first, int columns, Column* to) {
    for (int column = first; column < first + columns; column += 2 * kUnit, to += kUnit / 2) {
      Column transposed[kUnit / 4];
      Panel::transpose(rows, column / 2, transposed);
      for (int word = 0; word < kUnit / 4; ++word) {
        Column* const span = to + word / 4 * 8 + word % 4;
        Panel::unsign(span[0], transposed[word], 0, 0x0f0f0f0fU, 0x08080808U);
        Panel::unsign(span[4], transposed[word], 4, 0x0f0f0f0fU, 0x08080808U);
      }
    }
  }

  // Any K block. (What fills a word up meets zeros of the tokens.)
  static void order(PanelByTokens const& s, typename Panel::Rows const& rows, int first, int end, Column* to) {
    auto* const bytes = reinterpret_cast<std::uint8_t*>(to);
    for (int i = 0; i < kRows; ++i) {
      std::int8_t const* const row = rows.bytes[i];
      for (int block = first; block < end; ++block) {
        int const begin = block * s.group, count = std::min(s.group, s.k - begin);
        for (int j = 0; j < count; ++j) {
          int const column = begin + j, at = (block - first) * s.group_words() * 4 + j;
          int const byte = s.bits == 8 ? row[column] : row[column / 32 * 16 + column % 16];
          int const value = s.bits == 8 ? byte : static_cast<std::int8_t>(byte << (column % 32 < 16 ? 4 : 0)) >> 4;
          bytes[at / 4 * sizeof(Column) + i * 4 + at % 4] = static_cast<std::uint8_t>(value + zero_of(s.bits));
        }
      }
    }
  }

  // kCount tokens from `m` on by a K block's blocks from `first` to `end`.
  template <int kCount>
  [[gnu::always_inline]] static void multiply(PanelByTokens const& s, Column const* words, int m, int first, int end,
                                              float* sums) {
    std::int64_t const words_of_block = static_cast<std::int64_t>(s.group_words()) * Bytes::kWords;
    std::int64_t const blocks = s.blocks, stride = blocks * words_of_block;
    for (int block = first; block < end; ++block, words += s.group_words()) {
      Ints sum[kCount][kParts] = {};
      Panel::template multiply<kCount>(words, s.words_of(block), s.x + m * stride + block * words_of_block, stride,
                                       sum);
      add(s.parameters + static_cast<std::int64_t>(block) * 3 * kRows, s.tokens + m * blocks + block, blocks, sum,
          sums);
    }
  }

  template <int kCount>
  [[gnu::always_inline]] static void add(float const* parameters, TokenBlock const* tokens, std::int64_t stride,
                                         Ints const (&sum)[kCount][kParts], float* sums) {
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      Floats scale, total, offset;
      load(scale, parameters + part * kLanes), load(total, parameters + kRows + part * kLanes);
      load(offset, parameters + 2 * kRows + part * kLanes);
#pragma GCC unroll 8
      for (int t = 0; t < kCount; ++t) {
        TokenBlock const& token = tokens[t * stride];
        float* const to = sums + t * kRows + part * kLanes;
        Floats out;
        load(out, to);
        // (A scalar spreads in one instruction where it meets a vector; gcc would fill `sum` with it lane by lane.)
        out += __builtin_convertvector(sum[t][part] + token.correction, Floats) * scale * token.scale +
               offset * token.scaled_sum;
        out += total * token.offset;
        std::memcpy(to, &out, sizeof(out));
      }
    }
  }

  [[gnu::always_inline]] static void order_piece(PanelByTokens const& s, typename Panel::Rows const& rows, int first,
                                                 int end, Column* words) {
    int const column = first * s.group, columns = std::min(end * s.group, s.k) - column;
    if (!s.is_whole()) {
      order(s, rows, first, end, words);
    } else if (s.bits == 8) {
      Panel::order8(rows, column, columns, s.stride, words);
    } else {
      order4(rows, column, columns, words);
    }
  }

  // sums [m, kRows]: added to.
  [[gnu::always_inline]] static void run(PanelByTokens const& s, float* sums) {
    auto* const words = static_cast<Column*>(s.words);
    typename Panel::Rows const rows(s.values, s.stride, s.rows);
    for (int first = 0; first < s.blocks; first += s.blocks_at_once()) {
      int const end = std::min(first + s.blocks_at_once(), s.blocks);
      order_piece(s, rows, first, end, words);
      Panel::by_tokens(s.m, [&]<int kCount>(int m) __attribute__((always_inline)) {
        multiply<kCount>(s, words, m, first, end, sums + m * kRows);
      });
    }
  }
};

}  // namespace epiloq::ops::online_quant_mm
