#pragma once

// Kernels for weights of 4-bit indices into a table of 16 numbers: a few tokens by rows in memory order, and rows as
// numbers.

#include <algorithm>
#include <vector>

#include "cpu/common/rows.h"
#include "cpu/isa/vectors.h"
#include "problems/table_mm.h"

namespace epiloq::ops::table_mm {

inline constexpr int kOfWord = 8;  // indices in four bytes, the first in the upper half of the first byte
inline constexpr int kShifts[kOfWord] = {4, 0, 12, 8, 20, 16, 28, 24};
inline constexpr int kTokens = 4, kPanelRows = 16;

// The table's numbers of the lower four bits of each word.
template <int kLanes>
struct Table {
  using Floats = typename Vectors<kLanes>::Floats;
  using Ints = typename Vectors<kLanes>::Ints;
  float const* numbers;

  [[gnu::always_inline]] void look_up(Floats& out, Ints const& words) const {
#ifdef EPILOQ_HAS_CLONES
    if constexpr (kLanes == 16) {
      Floats table;
      load(table, numbers);
      out = __builtin_shuffle(table, words);
      return;
    }
    if constexpr (kLanes == 8) {
      Floats lower, upper;
      load(lower, numbers), load(upper, numbers + kLanes);
      Floats const low = __builtin_shuffle(lower, words), high = __builtin_shuffle(upper, words);
      out = (words & kLanes) != 0 ? high : low;
      return;
    }
#endif
    for (int i = 0; i < kLanes; ++i) out[i] = numbers[words[i] & 15];
  }
};

// A few tokens by rows in memory order. Each word of eight indices lies in a lane, and a shift takes one of each: of
// 8 kLanes columns a token has the columns 0, 8, 16, … first, then 1, 9, 17, … and so on.
struct Rows {
  Weight const& weight;
  std::int64_t first, count;
  float const* x;  // [tokens up to a multiple of kTokens, stride]
  std::int64_t stride;
  int tokens;
};

template <int kLanes>
struct FewTokens {
  static constexpr int kStep = kOfWord * kLanes;  // columns
  using Floats = typename Vectors<kLanes>::Floats;
  using Ints = typename Vectors<kLanes>::Ints;

  static void arrange(float const* row, std::int64_t columns, float* out) {
    for (std::int64_t i = 0; i < columns; ++i) {
      std::int64_t const in_step = i % kStep;
      out[i - in_step + in_step % kOfWord * kLanes + in_step / kOfWord] = row[i];
    }
  }

  template <int kRows, int kAtOnce>
  [[gnu::always_inline]] static void add(Table<kLanes> const& table, std::uint8_t const* const (&codes)[kRows],
                                         float const* const (&scales)[kRows], float const* x, std::int64_t stride,
                                         Floats (&total)[kRows][kAtOnce]) {
    for (int r = 0; r < kRows; ++r) {
      Floats sum[kAtOnce] = {}, scale;
      Ints words;
      load(words, codes[r]), load(scale, scales[r]);
#pragma GCC unroll 8
      for (int i = 0; i < kOfWord; ++i) {
        Floats value, token;
        table.look_up(value, words >> kShifts[i]);
#pragma GCC unroll 4
        for (int m = 0; m < kAtOnce; ++m) {
          load(token, x + m * stride + i * kLanes);
          sum[m] += value * token;
        }
      }
      for (int m = 0; m < kAtOnce; ++m) total[r][m] += sum[m] * scale;
    }
  }

  [[gnu::always_inline]] static float sum_of(Floats const& lanes) {
    float values[kLanes], sum = 0.f;
    std::memcpy(values, &lanes, sizeof(lanes));
    for (float value : values) sum += value;
    return sum;
  }

  // Rows from `row` on by tokens; of_words: a scale per word.
  template <int kRows, int kAtOnce>
  [[gnu::always_inline]] static void block(Rows const& s, std::int64_t row, float const* of_words, std::int64_t words,
                                           float const* x, Line* sums) {
    Weight const& w = s.weight;
    Table<kLanes> const table{w.table};
    Floats total[kRows][kAtOnce] = {};
    std::uint8_t const* codes[kRows];
    float const* scales[kRows];
    std::int64_t column = 0;
    for (int r = 0; r < kRows; ++r) {
      std::int64_t const here = std::min<std::int64_t>(row + r, s.count - 1);
      codes[r] = w.codes + (s.first + here) * w.k / 2, scales[r] = of_words + here * words;
    }
    for (; column + kStep <= w.k; column += kStep) {
      add<kRows, kAtOnce>(table, codes, scales, x + column, s.stride, total);
      for (int r = 0; r < kRows; ++r) codes[r] += kStep / 2, scales[r] += kLanes;
    }
    if (column < w.k) {
      std::uint8_t rest[kRows][kStep / 2] = {};
      for (int r = 0; r < kRows; ++r) std::copy_n(codes[r], (w.k - column) / 2, rest[r]), codes[r] = rest[r];
      add<kRows, kAtOnce>(table, codes, scales, x + column, s.stride, total);
    }
    for (int r = 0; r < kRows; ++r) {
      for (int m = 0; m < kAtOnce; ++m) sums[m].values[row + r] = sum_of(total[r][m]);
    }
  }

  // Up to 16 rows; sums [tokens up to a multiple of kTokens].
  [[gnu::always_inline]] static void run(Rows const& s, Line* sums) {
    Weight const& w = s.weight;
    std::int64_t const words = (w.k + kStep - 1) / kStep * kLanes;
    std::vector<float> of_words(s.count * words);
    for (std::int64_t r = 0; r < s.count; ++r) {
      float const* const scale = w.scale + (s.first + r) * w.k / w.block_size;
      std::int64_t const of_block = w.block_size / kOfWord;
      for (std::int64_t block = 0; block < w.k / w.block_size; ++block) {
        std::fill_n(of_words.data() + r * words + block * of_block, of_block, scale[block]);
      }
    }
    for (int m = 0; m < s.tokens; m += kTokens) {
      float const* const x = s.x + m * s.stride;
      int const left = s.tokens - m;
      if (left == 1) {
        for (std::int64_t row = 0; row < s.count; row += 4) block<4, 1>(s, row, of_words.data(), words, x, sums + m);
      } else if (left == 2) {
        for (std::int64_t row = 0; row < s.count; row += 2) block<2, 2>(s, row, of_words.data(), words, x, sums + m);
      } else {
        for (std::int64_t row = 0; row < s.count; ++row) block<1, 4>(s, row, of_words.data(), words, x, sums + m);
      }
    }
  }
};

// `count` numbers under one scale; an even number of indices.
template <int kLanes>
struct Dequantize {
  using Floats = typename Vectors<kLanes>::Floats;
  using Ints = typename Vectors<kLanes>::Ints;

  [[gnu::always_inline]] static void run(std::uint8_t const* codes, std::int64_t count, float const* table, float scale,
                                         float* out) {
    std::int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      typename Vectors<kLanes / 2>::Bytes bytes;
      load(bytes, codes + i / 2);
      auto const pairs = __builtin_convertvector(bytes, typename Vectors<kLanes / 2>::UnsignedShorts);
      auto const in_order = pairs >> 4 | (pairs & 15) << 8;
      typename Vectors<kLanes>::Bytes indices;
      std::memcpy(&indices, &in_order, sizeof(indices));
      Floats numbers;
      auto const wide = __builtin_convertvector(indices, typename Vectors<kLanes>::Shorts);
      Table<kLanes>{table}.look_up(numbers, __builtin_convertvector(wide, Ints));
      numbers *= scale;
      std::memcpy(out + i, &numbers, sizeof(numbers));
    }
    for (; i < count; ++i) out[i] = table[codes[i / 2] >> (i % 2 == 0 ? 4 : 0) & 15] * scale;
  }
};

}  // namespace epiloq::ops::table_mm
