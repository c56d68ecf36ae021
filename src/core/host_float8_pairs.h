#pragma once

// Many rows of float8 by a matrix of float8 on a CPU that has pairs of bfloat16, which holds both exactly: 16 rows of
// the matrix at a time, 128 columns of which lie under one scale of each operand.

#include "core/host_float8.h"
#include "core/host_pair_tiles.h"
#include "core/host_pairs.h"

namespace epiloq {

inline constexpr int kFloat8Columns = 128;

#ifdef EPILOQ_HAS_CLONES
struct Float8Pairs {
  std::uint32_t const* x;  // by blocks
  float const* scale;      // [pieces of 128 columns, stride]
  std::int64_t stride;
  int count;
};

template <class Format>
struct ManyFloat8 {
  static constexpr int kLanes = 16, kPairs = kFloat8Columns / 2;
  using Floats = Vectors<kLanes>::Floats;
  using Ints = Vectors<kLanes>::Ints;

  // 32 columns of a row, `count` of which are there.
  [[gnu::always_inline]] static void pairs_of(std::uint32_t (&out)[kLanes], std::uint8_t const* from,
                                              std::int64_t count) {
    std::uint8_t rest[2 * kLanes] = {};
    if (count < 2 * kLanes) from = static_cast<std::uint8_t const*>(std::memcpy(rest, from, count));
    Floats first, second;
    WidenFloat8<Format, kLanes>::vector(first, from, 1.f);
    WidenFloat8<Format, kLanes>::vector(second, from + kLanes, 1.f);
    Ints even = (Ints)__builtin_shufflevector(first, second, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    Ints odd = (Ints)__builtin_shufflevector(first, second, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    pair_of(even, even, odd);
    std::memcpy(out, &even, sizeof(even));
  }

  // A row's pairs, `step` apart.
  [[gnu::always_inline]] static void spread(std::uint8_t const* row, std::int64_t count, std::uint32_t* out, int step) {
    for (std::int64_t first = 0; first < count; first += 2 * kLanes) {
      std::uint32_t pairs[kLanes];
      pairs_of(pairs, row + first, std::min<std::int64_t>(2 * kLanes, count - first));
      auto const here = static_cast<int>(std::min<std::int64_t>(kLanes, (count - first + 1) / 2));
      for (int i = 0; i < here; ++i, out += step) *out = pairs[i];
    }
  }
  // Row m of x to its block, or to a row of pairs, for tiles.
  [[gnu::target("arch=x86-64-v4")]] static void bring_row(ScaledFloat8 const& x, std::int64_t m, std::uint32_t* row) {
    spread(x.values + m * x.stride, x.columns, row, 1);
  }
  [[gnu::target("arch=x86-64-v4")]] static void bring(ScaledFloat8 const& x, std::int64_t m, std::uint32_t* blocks) {
    std::int64_t const pairs = (x.columns + 1) / 2;
    spread(x.values + m * x.stride, x.columns, blocks + m / kPairBlock * kPairBlock * pairs + m % kPairBlock,
           kPairBlock);
  }

  template <int kTokens>
  [[gnu::always_inline]] static void multiply(Line const* pairs, int count, std::uint32_t const* x, Floats const& scale,
                                              float const* of_token, Line* sums) {
    Floats sum[kTokens] = {};
    for (int i = 0; i < count; ++i, x += kPairBlock) {
      Floats rows;
      load(rows, pairs[i].values);
#pragma GCC unroll 12
      for (int m = 0; m < kTokens; ++m) add_pair(sum[m], rows, x[m]);
    }
#pragma GCC unroll 12
    for (int m = 0; m < kTokens; ++m) {
      Floats total;
      load(total, sums[m].values);
      total += scale * of_token[m] * sum[m];
      std::memcpy(sums[m].values, &total, sizeof(total));
    }
  }

  // 128 columns of 16 rows, or as many as there are, zeros for the rest, and the rows' scales.
  [[gnu::always_inline]] static int take(ScaledFloat8 const& w, std::int64_t row, std::int64_t first,
                                         Line (&pairs)[kPairs], Line& scales) {
    auto const rows = static_cast<int>(std::min<std::int64_t>(kLanes, w.rows - row));
    auto const count = static_cast<int>(std::min<std::int64_t>(kFloat8Columns, w.columns - first));
    if (rows < kLanes || count < kFloat8Columns) std::fill_n(pairs, kPairs, Line{}), scales = {};
    for (int r = 0; r < rows; ++r) {
      spread(w.values + (row + r) * w.stride + first, count, reinterpret_cast<std::uint32_t*>(pairs) + r, kLanes);
      scales.values[r] = w.scale_at(row + r, first);
    }
    return count;
  }

  // sums [tokens.count]: added to, of 16 rows from `row` on.
  [[gnu::target("arch=x86-64-v4")]] static void run(ScaledFloat8 const& w, std::int64_t row, Float8Pairs const& tokens,
                                                    Line* sums) {
    Line pairs[kPairs], scales;
    std::int64_t const of_token = (w.columns + 1) / 2;
    for (std::int64_t first = 0, piece = 0; first < w.columns; first += kFloat8Columns, ++piece) {
      int const count = take(w, row, first, pairs, scales);
      Floats scale;
      load(scale, scales.values);
      by_blocks<kPairBlock>(tokens.count, [&]<int kTokens>(int m) __attribute__((always_inline)) {
        multiply<kTokens>(pairs, (count + 1) / 2, tokens.x + m * of_token + first / 2 * kPairBlock, scale,
                          tokens.scale + piece * tokens.stride + m, sums + m);
      });
    }
  }

  // The same of tokens that lie for tiles, with their scales as above.
  [[EPILOQ_PAIR_TILES]] static void run_in_tiles(ScaledFloat8 const& w, std::int64_t row, TokensOfTiles tokens,
                                                 float const* scale, std::int64_t stride, Line* sums) {
    Tiles const tiles;
    Line pairs[kPairs], scales;
    for (std::int64_t first = 0; first < w.columns; first += kFloat8Columns) {
      int const count = take(w, row, first, pairs, scales);
      PairTiles::add(pairs, (count + kTileColumns - 1) / kTileColumns, tokens, scales, scale, sums);
      tokens.x += kFloat8Columns, scale += stride;
    }
  }
};
#endif

}  // namespace epiloq
