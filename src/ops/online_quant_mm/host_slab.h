#pragma once

// 16 rows of the weight by quantised tokens. Words of four columns of each row lie side by side, as `core/host_bytes.h`
// multiplies them, made unsigned.

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/host_bytes.h"
#include "core/host_vectors.h"

namespace epiloq::ops::online_quant_mm {

inline constexpr int kSlab = 16;
// Columns that are brought into order at a time, at least: they stay in the first cache.
inline constexpr int kPiece = 256;

// What is added to 8-bit or 4-bit integers to make them unsigned.
constexpr int zero_of(int bits) { return bits == 8 ? 128 : 8; }

struct TokenBlock {
  float scale, offset, scaled_sum;
  std::int32_t correction;  // of integer sums: minus the zero times the sum of the token's integers
};

struct SlabByTokens {
  std::int8_t const* values;
  std::int64_t stride;  // bytes
  int rows, bits;
  int k, group, blocks;
  float const* parameters;   // [blocks, 3, 16]: scale, total, offset
  std::int32_t const* x;     // [m, words of a token], blocks filled up to whole words
  TokenBlock const* tokens;  // [m, blocks]
  int m;
  Line* words;  // workspace_lines(..)

  int group_words() const { return (group + 3) / 4; }
  int words_of(int block) const { return (std::min(group, k - block * group) + 3) / 4; }
  int blocks_at_once() const { return std::max(1, kPiece / group); }
  // Whether pieces begin and end where 16 words of a row do, at 4 bits as well.
  bool is_whole() const { return (group % 4 == 0 && kPiece % group == 0) || group % 128 == 0; }
  // Columns of 16 words of a row.
  int unit() const { return 64 * 8 / bits; }
};

inline std::int64_t workspace_lines(SlabByTokens const& s) {
  return (static_cast<std::int64_t>(s.blocks_at_once()) * s.group_words() + 31) / 32 * 32;
}

template <class Bytes>
struct MultiplySlab {
  static constexpr int kLanes = Bytes::kLanes, kParts = kSlab / kLanes;
  // Tokens whose sums registers hold.
  static constexpr int kTokens = kLanes == 16 ? 8 : 4;
  using Ints = typename Vectors<kLanes>::Ints;
  using Floats = typename Vectors<kLanes>::Floats;

  // 16 words of each of 16 rows, from rows to columns.
  [[gnu::always_inline]] static void turn(std::int8_t const* const (&rows)[kSlab], std::int64_t at, Line* out) {
    if constexpr (kLanes == kSlab) {
      Ints v[kSlab];
      for (int i = 0; i < kSlab; ++i) load(v[i], rows[i] + at);
#pragma GCC unroll 4
      for (int stage = 0; stage < 4; ++stage) {
        Ints turned[kSlab];
#pragma GCC unroll 8
        for (int i = 0; i < kSlab / 2; ++i) {
          zip_low(turned[2 * i], v[i], v[i + kSlab / 2]);
          zip_high(turned[2 * i + 1], v[i], v[i + kSlab / 2]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < kSlab; ++i) v[i] = turned[i];
      }
      std::memcpy(out, v, sizeof(v));
    } else {
      for (int i = 0; i < kSlab; ++i) {
        for (int word = 0; word < kSlab; ++word) {
          std::memcpy(out[word].values + i, rows[i] + at + 4 * word, sizeof(float));
        }
      }
    }
  }

  [[gnu::always_inline]] static void store(Line& to, Ints const* words, int shift, int mask, int sign) {
    for (int part = 0; part < kParts; ++part) {
      Ints const bytes = ((words[part] >> shift) & mask) ^ sign;
      std::memcpy(to.values + part * kLanes, &bytes, sizeof(bytes));
    }
  }

  // Columns of a piece that starts and ends with 16 words of a row.
  [[gnu::always_inline]] static void order_whole(SlabByTokens const& s, int first, int columns) {
    constexpr int kNibbles = 0x0f0f0f0f, kSign4 = 0x08080808, kSign8 = static_cast<int>(0x80808080u);
    std::int8_t const* rows[kSlab];
    for (int i = 0; i < kSlab; ++i) rows[i] = s.values + std::min(i, s.rows - 1) * s.stride;
    for (int column = 0; column < columns; column += s.unit()) {
      Line turned[kSlab];
      turn(rows, static_cast<std::int64_t>(first + column) * s.bits / 8, turned);
      Line* const to = s.words + column / 4;
      for (int word = 0; word < kSlab; ++word) {
        Ints words[kParts];
        std::memcpy(words, turned + word, sizeof(words));
        if (s.bits == 8) {
          store(to[word], words, 0, -1, kSign8);
        } else {  // Byte b of 16 has the values b and b + 16.
          Line* const span = to + word / 4 * 8 + word % 4;
          store(span[0], words, 0, kNibbles, kSign4);
          store(span[4], words, 4, kNibbles, kSign4);
        }
      }
    }
  }

  // Any other piece. (What fills a word up meets zeros of the tokens.)
  static void order(SlabByTokens const& s, int first, int end) {
    auto* const bytes = reinterpret_cast<std::uint8_t*>(s.words);
    for (int i = 0; i < kSlab; ++i) {
      std::int8_t const* const row = s.values + std::min(i, s.rows - 1) * s.stride;
      for (int block = first; block < end; ++block) {
        int const begin = block * s.group, count = std::min(s.group, s.k - begin);
        for (int j = 0; j < count; ++j) {
          int const column = begin + j, at = (block - first) * s.group_words() * 4 + j;
          int const byte = s.bits == 8 ? row[column] : row[column / 32 * 16 + column % 16];
          int const value = s.bits == 8 ? byte : static_cast<std::int8_t>(byte << (column % 32 < 16 ? 4 : 0)) >> 4;
          bytes[at / 4 * sizeof(Line) + i * 4 + at % 4] = static_cast<std::uint8_t>(value + zero_of(s.bits));
        }
      }
    }
  }

  // kCount tokens by a piece's blocks from `first` to `end`.
  template <int kCount>
  [[gnu::always_inline]] static void multiply(SlabByTokens const& s, int m, int first, int end, Line* sums) {
    std::int64_t const words_of_block = static_cast<std::int64_t>(s.group_words()) * Bytes::kWords;
    std::int64_t const blocks = s.blocks, stride = blocks * words_of_block;
    for (int block = first; block < end; ++block) {
      TokenBlock const* const tokens = s.tokens + m * blocks + block;
      std::int32_t const* const x = s.x + m * stride + block * words_of_block;
      Line const* const words = s.words + static_cast<std::int64_t>(block - first) * s.group_words();
      Ints sum[kCount][kParts] = {};
      int const count = s.words_of(block);
      for (int word = 0; word < count; ++word) {
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part) {
          typename Bytes::Rows rows;
          rows.load(words[word].values + part * kLanes);
#pragma GCC unroll 8
          for (int t = 0; t < kCount; ++t) rows.add(sum[t][part], x + t * stride + word * Bytes::kWords);
        }
      }
      add(s.parameters + static_cast<std::int64_t>(block) * 3 * kSlab, tokens, blocks, sum, sums);
    }
  }

  template <int kCount>
  [[gnu::always_inline]] static void add(float const* parameters, TokenBlock const* tokens, std::int64_t stride,
                                         Ints const (&sum)[kCount][kParts], Line* sums) {
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      Floats scale, total, offset;
      load(scale, parameters + part * kLanes), load(total, parameters + kSlab + part * kLanes);
      load(offset, parameters + 2 * kSlab + part * kLanes);
#pragma GCC unroll 8
      for (int t = 0; t < kCount; ++t) {
        TokenBlock const& token = tokens[t * stride];
        Floats out;
        load(out, sums[t].values + part * kLanes);
        out += __builtin_convertvector(sum[t][part] + token.correction, Floats) * scale * token.scale +
               offset * token.scaled_sum;
        out += total * token.offset;
        std::memcpy(sums[t].values + part * kLanes, &out, sizeof(out));
      }
    }
  }

  // sums [m]: added to.
  [[gnu::always_inline]] static void run(SlabByTokens const& s, Line* sums) {
    for (int first = 0; first < s.blocks; first += s.blocks_at_once()) {
      int const end = std::min(first + s.blocks_at_once(), s.blocks);
      if (s.is_whole()) {
        order_whole(s, first * s.group, std::min(end * s.group, s.k) - first * s.group);
      } else {
        order(s, first, end);
      }
      int m = 0;
      for (; m + kTokens <= s.m; m += kTokens) multiply<kTokens>(s, m, first, end, sums + m);
      [&]<int... kRest>(std::integer_sequence<int, kRest...>) __attribute__((always_inline)) {
        ((kRest + 1 == s.m - m ? multiply<kRest + 1>(s, m, first, end, sums + m) : void()), ...);
      }(std::make_integer_sequence<int, kTokens - 1>{});
    }
  }
};

}  // namespace epiloq::ops::online_quant_mm
