#pragma once

// Prefill kernel for bfloat16 tokens on AVX-512 BF16: integers less their zero points, or E2M1 numbers, which bfloat16
// represents exactly, in the order of the panel's parameters. A group's sums are multiplied by its scale, in
// float32.

#include "cpu/isa/avx512_bf16.h"
#include "cpu/w4a16/prefill.h"

namespace epiloq::ops::weight_only_mm {

#ifdef EPILOQ_HAS_CLONES
struct PanelByPairs {
  PanelByTokens panel;  // of which neither offsets nor x are looked at
  int group;            // even
  std::uint32_t const* x;
};

struct LargeMPairs {
  static constexpr int kLanes = 16;
  using Floats = Vectors<kLanes>::Floats;
  using Ints = Vectors<kLanes>::Ints;

  // A column's differences or numbers, as the upper halves of float32.
  template <bool kFp4>
  [[gnu::always_inline]] static void values(Ints& out, PanelByTokens const& s, int column, Codes const& codes) {
    Vectors<kLanes>::Bytes q;
    Floats zero;
    load(q, codes.values), load(zero, s.zero + s.groups[column]);
    auto const wide = __builtin_convertvector(__builtin_convertvector(q, Vectors<kLanes>::Shorts), Ints);
    Floats of_column;
    if constexpr (kFp4) {
      widen_e2m1<kLanes>(of_column, wide);
    } else {
      of_column = __builtin_convertvector(wide, Floats) - zero;
    }
    out = (Ints)of_column;
  }

  template <bool kFp4>
  [[gnu::always_inline]] static void pair_up(PanelByTokens const& s, int first, int count, Codes const* codes,
                                             Line* out) {
    for (int column = 0; column < count; column += 2) {
      Ints even, odd{};
      values<kFp4>(even, s, first + column, codes[column]);
      if (column + 1 < count) values<kFp4>(odd, s, first + column + 1, codes[column + 1]);
      pair_of(even, even, odd);
      std::memcpy(out[column / 2].values, &even, sizeof(even));
    }
  }

  template <int kTokens>
  [[gnu::always_inline]] static void multiply(PanelByPairs const& s, int first, int count, Line const* pairs,
                                              std::uint32_t const* x, Line* sums) {
    Floats total[kTokens];
    std::memcpy(total, sums, sizeof(total));
    for (int column = 0; column < count;) {
      int const of_group = std::min(count - column, s.group - (first + column) % s.group), end = column + of_group;
      Floats scale, sum[kTokens] = {};
      load(scale, s.panel.scale + s.panel.groups[first + column]);
      for (; column < end; column += 2, ++pairs, x += kPairBlock) {
        Floats weights;
        load(weights, pairs->values);
#pragma GCC unroll 12
        for (int m = 0; m < kTokens; ++m) add_pair(sum[m], weights, x[m]);
      }
#pragma GCC unroll 12
      for (int m = 0; m < kTokens; ++m) total[m] += scale * sum[m];
    }
    std::memcpy(sums, total, sizeof(total));
  }

  // sums [m]: added to.
  [[gnu::target("arch=x86-64-v4")]] static void run(PanelByPairs const& s, Line* sums) {
    Codes codes[kColumns];
    Line pairs[kColumns / 2];
    std::int64_t const of_token = (s.panel.k + 1) / 2;
    for (int first = 0; first < s.panel.k; first += kColumns) {
      int const count = std::min(kColumns, s.panel.k - first);
      LargeM<kLanes>::unpack(s.panel, first, first + count, codes);
      s.panel.is_fp4 ? pair_up<true>(s.panel, first, count, codes, pairs)
                     : pair_up<false>(s.panel, first, count, codes, pairs);
      by_blocks<kPairBlock>(s.panel.m, [&]<int kTokens>(int m) __attribute__((always_inline)) {
        multiply<kTokens>(s, first, count, pairs, s.x + m * of_token + std::int64_t{first} / 2 * kPairBlock, sums + m);
      });
    }
  }
};
#endif

}  // namespace epiloq::ops::weight_only_mm
