#pragma once

// float8 GEMM on AVX-512 BF16 without AMX: 16 rows of the weight become columns of bfloat16 pairs once for all tokens,
// and a token's values are broadcast in pairs.

#include <vector>

#include "cpu/gemm/float8_avx512_bf16.h"

namespace epiloq {

#ifdef EPILOQ_HAS_CLONES
// Tokens by blocks, [block][word of a row][kPairBlock], with the scales of their K blocks of 128 columns.
struct Float8Blocks {
  std::uint32_t const* x;
  std::int64_t words;  // of a row
  float const* scale;  // [k_block, of_k_block], or null
  std::int64_t of_k_block;
  int count;
};

struct ColumnsByTokenBlocks {
  static constexpr int kRows = 16, kPairs = kFloat8Columns / 2;
  using Floats = Vectors<kRows>::Floats;
  using Words = Float8Lookup::Words;

  static std::int64_t words(std::int64_t columns) { return RowsByTokens::lines(columns) * kRows; }

  // Pairs of 64 columns of a matrix's rows, by columns: those of up to 16 rows side by side.
  template <int kCount>
  [[gnu::always_inline]] static void widen_transposed(Float8Lookup const& lookup, std::uint8_t const* const* rows,
                                                      std::int64_t at, Words (&columns)[2][kRows]) {
    for (int r = 0; r < kCount; ++r) lookup.widen(columns[0][r], columns[1][r], rows[r] + at);
    transpose(columns[0]), transpose(columns[1]);
  }

  // A block of tokens; past the end the last one is repeated.
  [[gnu::target("arch=x86-64-v4")]] static void arrange(ScaledFloat8 const& x, std::int64_t block, std::uint32_t* out) {
    Float8Lookup const lookup(x.is_e5m2);
    Float8Rows<kPairBlock> const tokens(x, block * kPairBlock);
    tokens.by_codes(0, x.columns, [&](auto const& from, std::int64_t at, std::int64_t) __attribute__((always_inline)) {
      Words columns[2][kRows] = {};
      widen_transposed<kPairBlock>(lookup, from, at, columns);
      for (auto const& half : columns) {
        for (Words const& column : half) {
          std::memcpy(out, &column, kPairBlock * sizeof(*out));
          out += kPairBlock;
        }
      }
    });
  }

  // The same of bfloat16; zeros past the end.
  static void arrange(FloatRows const& x, std::int64_t block, std::uint32_t* out) {
    std::vector<Line> row(RowsByTokens::lines(x.columns));
    std::vector<std::uint32_t> words(row.size() * kRows);
    for (std::int64_t i = 0, m = block * kPairBlock; i < kPairBlock && m < x.rows; ++i, ++m) {
      RowsByTokens::arrange(x, m, row.data());
      std::memcpy(words.data(), row.data(), words.size() * sizeof(words[0]));
      for (std::size_t word = 0; word < words.size(); ++word) out[word * kPairBlock + i] = words[word];
    }
  }

  // sums [m] += scales times columns . x[m].
  template <int kTokens>
  [[gnu::always_inline]] static void multiply(Line const* columns, int count, std::uint32_t const* x,
                                              Floats const& of_rows, float const* of_token, Line* sums) {
    Floats sum[kTokens] = {};
    for (int i = 0; i < count; ++i, x += kPairBlock) {
      Floats column;
      load(column, columns[i].values);
#pragma GCC unroll 12
      for (int m = 0; m < kTokens; ++m) add_pair(sum[m], column, x[m]);
    }
#pragma GCC unroll 12
    for (int m = 0; m < kTokens; ++m) {
      Floats total;
      load(total, sums[m].values);
      total += sum[m] * (of_token == nullptr ? of_rows : of_rows * of_token[m]);
      std::memcpy(sums[m].values, &total, sizeof(total));
    }
  }

  // 16 rows from `row` on; sums [tokens.count].
  [[gnu::target("arch=x86-64-v4")]] static void run(ScaledFloat8 const& w, std::int64_t row, Float8Blocks const& tokens,
                                                    Line* sums) {
    Float8Lookup const lookup(w.is_e5m2);
    Float8Rows<kRows> const rows(w, row);
    Line columns[kPairs];
    std::fill_n(sums, tokens.count, Line{});
    for (std::int64_t begin = 0, index = 0; begin < w.columns; begin += kFloat8Columns, ++index) {
      Line* out = columns;
      rows.by_codes(begin, std::min(begin + kFloat8Columns, w.columns),
                    [&](auto const& from, std::int64_t at, std::int64_t) __attribute__((always_inline)) {
                      Words words[2][kRows];
                      widen_transposed<kRows>(lookup, from, at, words);
                      std::memcpy(out, words, sizeof(words));
                      out += 2 * kRows;
                    });
      float scale[kRows];
      for (int r = 0; r < kRows; ++r) scale[r] = w.scale_at(rows.index(r), index);
      Floats of_rows;
      load(of_rows, scale);
      auto const count = static_cast<int>(out - columns);
      std::uint32_t const* const x = tokens.x + begin / 2 * kPairBlock;
      float const* const of_token = tokens.scale == nullptr ? nullptr : tokens.scale + index * tokens.of_k_block;
      by_blocks<kPairBlock>(tokens.count, [&]<int kTokens>(int m) __attribute__((always_inline)) {
        multiply<kTokens>(columns, count, x + m * tokens.words, of_rows, of_token == nullptr ? nullptr : of_token + m,
                          sums + m);
      });
    }
  }
};
#endif

}  // namespace epiloq
