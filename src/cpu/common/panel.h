#pragma once

// kRows weight rows by a few tokens (dot_bytes.h): words of four columns of the rows are interleaved, and made unsigned
// by an offset that is corrected with the tokens' sums.

#include <algorithm>

#include "cpu/isa/dot_bytes.h"

namespace epiloq {

// Reordered at a time: words of 16 columns of each row, or of 128 at 4 bits.
inline constexpr int kUnit = 64;  // bytes of a row
// Prefetch distance in bytes: hardware prefetchers do not follow as many rows as are read together.
inline constexpr int kAhead = 512;

template <class Bytes>
struct BytePanel {
  static constexpr int kLanes = Bytes::kLanes, kRows = Bytes::kRows, kParts = kRows / kLanes;
  using Ints = typename Vectors<kLanes>::Ints;
  using Floats = typename Vectors<kLanes>::Floats;
  // A word of each row, and the converted word.
  struct alignas(64) Column {
    std::int32_t values[kRows];
  };
  struct Rows {
    std::int8_t const* bytes[kRows];

    // Rows past the end repeat the last one.
    Rows(std::int8_t const* first, std::int64_t stride, int count) {
      for (int i = 0; i < kRows; ++i) bytes[i] = first + std::min(i, count - 1) * stride;
    }
  };

  // Transposes the unit that begins at byte `at`.
  [[gnu::always_inline]] static void transpose(Rows const& rows, std::int64_t at, Column* out) {
    constexpr int kWordsOfUnit = kUnit / 4;
    if constexpr (kLanes == kWordsOfUnit) {
      for (int part = 0; part < kParts; ++part) {
        Ints v[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) load(v[i], rows.bytes[part * kLanes + i] + at);
        epiloq::transpose(v);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) std::memcpy(out[i].values + part * kLanes, v + i, sizeof(Ints));
      }
    } else {
      for (int i = 0; i < kRows; ++i) {
        for (int word = 0; word < kWordsOfUnit; ++word) {
          std::memcpy(out[word].values + i, rows.bytes[i] + at + 4 * word, sizeof(std::int32_t));
        }
      }
    }
  }

  // to = ((from >> shift) & mask) ^ sign, in each word.
  [[gnu::always_inline]] static void unsign(Column& to, Column const& from, int shift, std::uint32_t mask,
                                            std::uint32_t sign) {
    for (int part = 0; part < kParts; ++part) {
      Ints words;
      load(words, from.values + part * kLanes);
      words = ((words >> shift) & static_cast<int>(mask)) ^ static_cast<int>(sign);
      std::memcpy(to.values + part * kLanes, &words, sizeof(words));
    }
  }

  // 8-bit columns `first` to `end`, a unit at a time.
  [[gnu::always_inline]] static void order8(Rows const& rows, std::int64_t first, std::int64_t columns,
                                            std::int64_t end, Column* to) {
    for (std::int64_t column = first; column < first + columns; column += kUnit, to += kUnit / 4) {
      if (column + kUnit <= end) {
        transpose(rows, column, to);
      } else {
        std::int8_t last[kRows][kUnit] = {};
        for (int i = 0; i < kRows; ++i) std::memcpy(last[i], rows.bytes[i] + column, end - column);
        transpose(Rows(last[0], kUnit, kRows), 0, to);
      }
      for (int word = 0; word < kUnit / 4; ++word) unsign(to[word], to[word], 0, ~0U, 0x80808080U);
    }
  }

  // Adds the products of `count` words by kCount tokens, which are `stride` words apart.
  template <int kCount>
  [[gnu::always_inline]] static void multiply(Column const* words, std::int64_t count, std::int32_t const* x,
                                              std::int64_t stride, Ints (&sum)[kCount][kParts]) {
    for (std::int64_t word = 0; word < count; ++word, x += Bytes::kWords) {
      typename Bytes::Rows rows[kParts];
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) rows[part].load(words[word].values + part * kLanes);
#pragma GCC unroll 8
      for (int t = 0; t < kCount; ++t) {
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part) rows[part].add(sum[t][part], x + t * stride);
      }
    }
  }

  // Whether `dot` exists: if words are in memory order.
  static constexpr bool kHasDot = Bytes::kWords == 1;

  // Adds the products of 8-bit rows, made unsigned, by one token: columns are lanes, without reordering.
  [[gnu::always_inline]] static void dot(Rows const& rows, std::int64_t columns, std::int32_t const* x,
                                         std::int32_t* sums) {
    for (int part = 0; part < kParts; ++part) {
      std::int8_t const* const* const bytes = rows.bytes + part * kLanes;
      Ints sum[kLanes] = {}, words, token;
      auto const add = [&](int i) __attribute__((always_inline)) {
        Bytes::add(sum[i], words ^ static_cast<int>(0x80808080U), token);
      };
      std::int64_t column = 0;
      for (; column + kUnit <= columns; column += kUnit) {
        load(token, x + column / 4);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          __builtin_prefetch(bytes[i] + column + kAhead);
          load(words, bytes[i] + column), add(i);
        }
      }
      if (std::size_t const left = columns - column; left > 0) {
        std::int8_t last[kUnit] = {};
        std::memcpy(last, x + column / 4, (left + 3) / 4 * 4);
        load(token, last);
        for (int i = 0; i < kLanes; ++i) {
          std::memcpy(last, bytes[i] + column, left);
          load(words, last), add(i);
        }
      }
      sums_of_lanes(sum);
      Ints before;
      load(before, sums + part * kLanes);
      before += sum[0];
      std::memcpy(sums + part * kLanes, &before, sizeof(before));
    }
  }

  // call.template operator()<kCount>(first) for all `count` tokens, as many at a time as fit the registers.
  template <class Call>
  [[gnu::always_inline]] static void by_tokens(int count, Call const& call) {
    int first = 0;
    for (; first + Bytes::kTokens <= count; first += Bytes::kTokens) call.template operator()<Bytes::kTokens>(first);
    [&]<int... kRest>(std::integer_sequence<int, kRest...>) __attribute__((always_inline)) {
      ((kRest + 1 == count - first ? call.template operator()<kRest + 1>(first) : void()), ...);
    }(std::make_integer_sequence<int, Bytes::kTokens - 1>{});
  }
};

}  // namespace epiloq
