#pragma once

// float32 outer products on the CPU: columns of 16 rows, each multiplied by one value of a few tokens.

#include <utility>

#include "cpu/isa/vectors.h"

namespace epiloq {

// Calls call<tokens>(m) for blocks of kMost tokens from m on, and for the rest.
template <int kMost, class Call>
[[gnu::always_inline]] inline void by_blocks(int count, Call const& call) {
  int m = 0;
  for (; m + kMost <= count; m += kMost) call.template operator()<kMost>(m);
  [&]<int... kFewer>(std::integer_sequence<int, kFewer...>) __attribute__((always_inline)) {
    ((kFewer + 1 == count - m ? call.template operator()<kFewer + 1>(m) : void()), ...);
  }(std::make_integer_sequence<int, kMost - 1>{});
}

template <int kLanes>
struct ColumnsByTokens {
  static constexpr int kParts = 16 / kLanes;
  // Tokens whose sums fit the registers of every instruction set.
  static constexpr int kBlock = 6;
  using Floats = typename Vectors<kLanes>::Floats;

  template <int kTokens>
  [[gnu::always_inline]] static void block(Line const* columns, int count, float const* x, std::int64_t stride,
                                           Line* sums) {
    Floats sum[kTokens][kParts];
    std::memcpy(sum, sums, sizeof(sum));
    for (int i = 0; i < count; ++i) {
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        Floats column;
        load(column, columns[i].values + part * kLanes);
#pragma GCC unroll 6
        for (int m = 0; m < kTokens; ++m) sum[m][part] += column * x[m * stride + i];
      }
    }
    std::memcpy(sums, sum, sizeof(sum));
  }

  // sums[m] += columns . x[m], of `tokens` tokens.
  [[gnu::always_inline]] static void add(Line const* columns, int count, float const* x, std::int64_t stride,
                                         int tokens, Line* sums) {
    by_blocks<kBlock>(tokens, [&]<int kTokens>(int m) __attribute__((always_inline)) {
      block<kTokens>(columns, count, x + m * stride, stride, sums + m);
    });
  }
};

}  // namespace epiloq
