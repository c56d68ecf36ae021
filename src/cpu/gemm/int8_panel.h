#pragma once

// Panel of an int8 weight by int8 tokens: exact sums, modulo 2^32.

#include "cpu/common/panel.h"

namespace epiloq {

// Columns reordered at a time: they stay in L1.
inline constexpr int kInt8Piece = 512;

struct Int8PanelByTokens {
  std::int8_t const* weight;
  std::int64_t stride;
  int rows;
  std::int64_t k;
  std::int32_t const* x;  // [m, stride_x], as `in_words` has them
  std::int64_t stride_x;
  int m;
};

template <class Bytes>
struct MultiplyInt8 {
  using Panel = BytePanel<Bytes>;

  template <int kCount>
  [[gnu::always_inline]] static void add(typename Panel::Column const* words, std::int64_t count, std::int32_t const* x,
                                         std::int64_t stride, std::int32_t* sums) {
    typename Panel::Ints sum[kCount][Panel::kParts];
    std::memcpy(sum, sums, sizeof(sum));
    Panel::template multiply<kCount>(words, count, x, stride, sum);
    std::memcpy(sums, sum, sizeof(sum));
  }

  // sums [m, kRows]: added to, products of the weight plus 128.
  [[gnu::always_inline]] static void run(Int8PanelByTokens const& s, std::int32_t* sums) {
    typename Panel::Rows const rows(s.weight, s.stride, s.rows);
    if constexpr (Panel::kHasDot) {
      if (s.m == 1) return Panel::dot(rows, s.k, s.x, sums);
    }
    typename Panel::Column words[kInt8Piece / 4];
    for (std::int64_t first = 0; first < s.k; first += kInt8Piece) {
      std::int64_t const columns = std::min<std::int64_t>(kInt8Piece, s.k - first);
      Panel::order8(rows, first, columns, s.k, words);
      Panel::by_tokens(s.m, [&]<int kCount>(int m) __attribute__((always_inline)) {
        add<kCount>(words, (columns + 3) / 4, s.x + m * s.stride_x + first / 4 * Bytes::kWords, s.stride_x,
                    sums + m * Panel::kRows);
      });
    }
  }
};

}  // namespace epiloq
