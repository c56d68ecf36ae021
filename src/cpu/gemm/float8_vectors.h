#pragma once

// float8 weights by float32 tokens in vectors of kLanes floats: a code's bits are shifted to a float's fields.

#include <algorithm>

#include "core/float8.h"
#include "cpu/common/columns_by_tokens.h"
#include "cpu/gemm/float8.h"

namespace epiloq {

// Codes of a format at the top of 32 bits, as floats.
template <class Format, int kLanes>
struct Float8Codes {
  using Ints = typename Vectors<kLanes>::Ints;
  using Floats = typename Vectors<kLanes>::Floats;
  static constexpr int kDropped = 23 - Format::kMantissaBits;
  static constexpr int kBias = (127 - Format::kBias) << 23;
  static constexpr int kSmallest = 1 << Format::kMantissaBits;                // that has an exponent
  static constexpr int kEnd = Format::kMantissaBits == 3 ? 0x7f : 0x1f << 2;  // from here on NaN, or infinite
  static constexpr int kSign = static_cast<int>(0x80000000u);

  // Normal numbers.
  [[gnu::always_inline]] static void normal(Floats& out, Ints const& codes) {
    out = (Floats)(((codes >> (24 - kDropped)) & (kSign | 0x7f << kDropped)) + kBias);
  }

  // Any code. A subnormal comes out of the shift as 1 + m, in units of the smallest number, and should be 2 m.
  [[gnu::always_inline]] static void any(Floats& out, Ints const& codes) {
    constexpr float kUnit = std::bit_cast<float>(kBias + (1 << 23));
    Ints const code = codes >> 24 & 0x7f;
    Ints bits = (code << kDropped) + kBias;
    Floats const normal = (Floats)bits, subnormal = normal + normal - kUnit;
    bits = code < kSmallest ? (Ints)subnormal : bits;
    // Infinities have no mantissa.
    Ints const largest = (code << kDropped) | (kEnd == 0x7f ? 0x7fc00000 : 0x7f800000);
    bits = code >= kEnd ? largest : bits;
    out = (Floats)(bits | (codes & kSign));
  }
};

// Tokens per block of SmallMFloat8.
inline constexpr int kSmallMFloat = 4;

// Whether all codes are normal numbers.
template <class Format, int kBytes>
struct AllNormal {
  typedef std::uint64_t Words __attribute__((vector_size(kBytes)));
  using Codes = Float8Codes<Format, 4>;
  Words kept = ~Words{};  // bit 7 of a byte stays where a code is normal

  static constexpr std::uint64_t of_bytes(std::uint64_t byte) { return 0x0101010101010101u * byte; }
  [[gnu::always_inline]] void look_at(std::uint8_t const* from) {
    Words codes;
    std::memcpy(&codes, from, sizeof(codes));
    codes &= of_bytes(0x7f);
    kept &= (codes + of_bytes(0x80 - Codes::kSmallest)) & ~(codes + of_bytes(0x80 - Codes::kEnd));
  }
  [[gnu::always_inline]] bool all() const {
    std::uint64_t words[kBytes / 8], all = ~std::uint64_t{};
    std::memcpy(words, &kept, sizeof(words));
    for (std::uint64_t word : words) all &= word;
    return (all & of_bytes(0x80)) == of_bytes(0x80);
  }
};

template <class Format, int kLanes>
struct WidenFloat8 {
  using Ints = typename Vectors<kLanes>::Ints;
  using Floats = typename Vectors<kLanes>::Floats;
  typedef std::int8_t Bytes __attribute__((vector_size(kLanes)));
  using Shorts = typename Vectors<kLanes>::Shorts;

  [[gnu::always_inline]] static void vector(Floats& out, std::uint8_t const* from, float scale) {
    Bytes bytes;
    std::memcpy(&bytes, from, sizeof(bytes));
    // In two steps: gcc 12 compiles a conversion of four bytes at once byte by byte.
    Float8Codes<Format, kLanes>::any(out, __builtin_convertvector(__builtin_convertvector(bytes, Shorts), Ints) << 24);
    out *= scale;
  }

  // `count` values under one scale.
  [[gnu::always_inline]] static void under(std::uint8_t const* from, std::int64_t count, float scale, float* to) {
    Floats x;
    std::int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      vector(x, from + i, scale);
      std::memcpy(to + i, &x, sizeof(x));
    }
    if (i >= count) return;
    std::uint8_t rest[kLanes] = {};
    std::copy_n(from + i, count - i, rest);
    vector(x, rest, scale);
    std::memcpy(to + i, &x, (count - i) * sizeof(float));
  }

  // A row, each K block under its scale.
  [[gnu::always_inline]] static void row(ScaledFloat8 const& w, std::int64_t row, float* out) {
    for (std::int64_t column = 0; column < w.columns; column += kFloat8Columns) {
      under(w.values + row * w.stride + column, std::min<std::int64_t>(kFloat8Columns, w.columns - column),
            w.scale_at(row, column / kFloat8Columns), out + column);
    }
  }
};

// Tokens of float32 with their scales; zeros past the last column.
struct FloatTokens {
  float const* x;
  std::int64_t stride;
  int count;
};

// A few tokens by 16 rows of a matrix, whose codes are widened in registers. Each word of four codes lies in a lane,
// and a shift takes one of each: of a K block of 4 * kLanes columns a token has the columns 0, 4, 8, … first, then 1,
// 5, 9, … and so on. Tokens are there up to a multiple of kTokens.
template <class Format, int kLanes>
struct SmallMFloat8 {
  // Accumulators that fit the registers of every instruction set.
  static constexpr int kTokens = kSmallMFloat, kSums = kTokens, kPanelRows = 16, kKBlock = 4 * kLanes;
  using Ints = typename Vectors<kLanes>::Ints;
  using Floats = typename Vectors<kLanes>::Floats;
  using Codes = Float8Codes<Format, kLanes>;

  static void arrange(float const* row, std::int64_t columns, float* out) {
    for (std::int64_t i = 0; i < columns; ++i) out[i / kKBlock * kKBlock + i % 4 * kLanes + i % kKBlock / 4] = row[i];
  }

  template <int kRows, class Values>
  [[gnu::always_inline]] static void add_piece(Floats (&sums)[kSums], std::uint8_t const* const (&from)[kRows],
                                               float const* x, std::int64_t stride, Values const& values) {
    for (int r = 0; r < kRows; ++r) {
      Ints words;
      load(words, from[r]);
#pragma GCC unroll 4
      for (int byte = 0; byte < 4; ++byte) {
        Floats weight, token;
        values(weight, words << (24 - 8 * byte));
        for (int m = 0; m < kSums / kRows; ++m) {
          load(token, x + m * stride + byte * kLanes);
          sums[m * kRows + r] += weight * token;
        }
      }
    }
  }

  // Columns that share a scale per row; all but the last of a matrix are whole K blocks.
  template <int kRows>
  [[gnu::always_inline]] static void add(Floats (&sums)[kSums], std::uint8_t const* const (&rows)[kRows],
                                         std::int64_t count, float const* x, std::int64_t stride) {
    std::uint8_t const* from[kRows];
    std::int64_t i = 0;
    for (; i + kKBlock <= count; i += kKBlock) {
      AllNormal<Format, kKBlock> normal;
      for (int r = 0; r < kRows; ++r) from[r] = rows[r] + i, normal.look_at(from[r]);
      if (normal.all()) {
        add_piece<kRows>(sums, from, x + i, stride, Codes::normal);
      } else {
        add_piece<kRows>(sums, from, x + i, stride, Codes::any);
      }
    }
    if (i >= count) return;
    std::uint8_t rest[kRows][kKBlock] = {};
    for (int r = 0; r < kRows; ++r) std::copy_n(rows[r] + i, count - i, rest[r]), from[r] = rest[r];
    add_piece<kRows>(sums, from, x + i, stride, Codes::any);
  }

  [[gnu::always_inline]] static float sum_of(Floats const& lanes) {
    float values[kLanes];
    std::memcpy(values, &lanes, sizeof(lanes));
    for (int width = kLanes / 2; width > 0; width /= 2) {
      for (int i = 0; i < width; ++i) values[i] += values[i + width];
    }
    return values[0];
  }

  template <int kRows>
  [[gnu::always_inline]] static void rows(ScaledFloat8 const& w, std::int64_t row, float const* x, std::int64_t stride,
                                          int first, Line* out) {
    std::int64_t const k_block = w.scale == nullptr ? w.columns : kFloat8Columns;
    Floats total[kSums] = {};
    for (std::int64_t column = 0; column < w.columns; column += k_block) {
      Floats part[kSums] = {};
      std::uint8_t const* from[kRows];
      for (int r = 0; r < kRows; ++r) from[r] = w.values + std::min(row + r, w.rows - 1) * w.stride + column;
      add<kRows>(part, from, std::min(k_block, w.columns - column), x + column, stride);
      for (int i = 0; i < kSums; ++i) {
        total[i] += part[i] * w.scale_at(std::min(row + i % kRows, w.rows - 1), column / kFloat8Columns);
      }
    }
    for (int i = 0; i < kSums; ++i) out[i / kRows].values[first + i % kRows] = sum_of(total[i]);
  }

  // Products of the rows from `row` on; sums [tokens.count rounded up to a multiple of kTokens].
  [[gnu::always_inline]] static void run(ScaledFloat8 const& w, std::int64_t row, FloatTokens const& tokens,
                                         Line* sums) {
    for (int m = 0; m < tokens.count; m += kTokens, sums += kTokens) {
      float const* const x = tokens.x + m * tokens.stride;
      int const count = tokens.count - m;
      auto const rows_of = [&]<int kRows>() __attribute__((always_inline)) {
        for (int i = 0; i < kPanelRows && row + i < w.rows; i += kRows)
          rows<kRows>(w, row + i, x, tokens.stride, i, sums);
      };
      if (count == 1) {
        rows_of.template operator()<4>();
      } else if (count == 2) {
        rows_of.template operator()<2>();
      } else {
        rows_of.template operator()<1>();
      }
    }
  }
};

// Many tokens, in memory order, by 16 rows of a matrix: 128 columns at a time are converted to float32, interleaved.
template <class Format, int kLanes>
struct LargeMFloat8 {
  [[gnu::always_inline]] static void run(ScaledFloat8 const& w, std::int64_t row, FloatTokens const& tokens,
                                         Line* sums) {
    constexpr int kPanelRows = 16;
    Line columns[kFloat8Columns];
    float values[kFloat8Columns];
    std::fill_n(sums, tokens.count, Line{});
    for (std::int64_t first = 0; first < w.columns; first += kFloat8Columns) {
      auto const count = static_cast<int>(std::min<std::int64_t>(kFloat8Columns, w.columns - first));
      for (int r = 0; r < kPanelRows; ++r) {
        std::int64_t const here = std::min(row + r, w.rows - 1);
        WidenFloat8<Format, kLanes>::under(w.values + here * w.stride + first, count,
                                           w.scale_at(here, first / kFloat8Columns), values);
        for (int i = 0; i < count; ++i) columns[i].values[r] = values[i];
      }
      ColumnsByTokens<kLanes>::add(columns, count, tokens.x + first, tokens.stride, tokens.count, sums);
    }
  }
};

}  // namespace epiloq
