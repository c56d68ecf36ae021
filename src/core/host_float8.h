#pragma once

// Kernels of float8 on the CPU, for vectors of kLanes floats: a code's bits move to a float's places.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/float8.h"
#include "core/host_vectors.h"

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

  // What has an exponent and is finite.
  [[gnu::always_inline]] static void normal(Floats& out, Ints const& codes) {
    out = (Floats)(((codes >> (24 - kDropped)) & (kSign | 0x7f << kDropped)) + kBias);
  }

  // Anything. Without an exponent, a multiple of the smallest number is 1 + m above and should be 2 m.
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

// Whether all of some codes have an exponent and are finite.
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

// A matrix with the scales of its blocks.
struct ScaledFloat8 {
  std::uint8_t const* values;
  std::int64_t rows, columns, stride;
  bool is_e5m2;
  float const* scale;  // or null
  std::int64_t scale_rows, scale_columns, scale_stride_row, scale_stride_column;

  float scale_at(std::int64_t row, std::int64_t column) const {
    if (scale == nullptr) return 1.f;
    return scale[row / scale_rows * scale_stride_row + column / scale_columns * scale_stride_column];
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
    // In two steps: gcc 12 makes one of four a byte at a time.
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
    if (i == count) return;
    std::uint8_t rest[kLanes] = {};
    std::copy_n(from + i, count - i, rest);
    vector(x, rest, scale);
    std::memcpy(to + i, &x, (count - i) * sizeof(float));
  }

  [[gnu::always_inline]] static void run(ScaledFloat8 const& w, std::int64_t first, std::int64_t last, float* out,
                                         std::int64_t stride) {
    for (std::int64_t row = first; row < last; ++row) {
      for (std::int64_t column = 0; column < w.columns; column += w.scale_columns) {
        under(w.values + row * w.stride + column, std::min(w.scale_columns, w.columns - column),
              w.scale_at(row, column), out + row * stride + column);
      }
    }
  }
};

// Rows of a matrix by tokens: as many sums of kLanes lanes as fit the registers of every instruction set.
inline constexpr int kFloat8Sums = 4;

// Some tokens: each word of 4 codes lies in a lane, and a shift takes one of each; so of a piece of 4 * lanes columns a
// token has the columns 0, 4, 8 .. first, then 1, 5, 9 .. and so on. Zeros past the last column.
struct Float8Tokens {
  float const* x;
  std::int64_t stride_x;
  int count;
  float* out;
  std::int64_t stride_out;
};

template <class Format, int kLanes, int kTokens>
struct MultiplyFloat8 {
  static constexpr int kRows = kFloat8Sums / kTokens, kPiece = 4 * kLanes;
  using Ints = typename Vectors<kLanes>::Ints;
  using Floats = typename Vectors<kLanes>::Floats;
  using Codes = Float8Codes<Format, kLanes>;

  template <class Values>
  [[gnu::always_inline]] static void add_piece(Floats (&sums)[kRows][kTokens], std::uint8_t const* const (&from)[kRows],
                                               float const* x, std::int64_t stride_x, Values const& values) {
    for (int r = 0; r < kRows; ++r) {
      Ints words;
      load(words, from[r]);
#pragma GCC unroll 4
      for (int byte = 0; byte < 4; ++byte) {
        Floats weight, token;
        values(weight, words << (24 - 8 * byte));
        for (int m = 0; m < kTokens; ++m) {
          load(token, x + m * stride_x + byte * kLanes);
          sums[r][m] += weight * token;
        }
      }
    }
  }

  // Columns under one scale a row; all but the last ones of a matrix are whole pieces.
  [[gnu::always_inline]] static void add(Floats (&sums)[kRows][kTokens], std::uint8_t const* const (&values)[kRows],
                                         std::int64_t count, float const* x, std::int64_t stride_x) {
    std::uint8_t const* from[kRows];
    std::int64_t i = 0;
    for (; i + kPiece <= count; i += kPiece) {
      AllNormal<Format, kPiece> normal;
      for (int r = 0; r < kRows; ++r) from[r] = values[r] + i, normal.look_at(from[r]);
      if (normal.all()) {
        add_piece(sums, from, x + i, stride_x, Codes::normal);
      } else {
        add_piece(sums, from, x + i, stride_x, Codes::any);
      }
    }
    if (i == count) return;
    std::uint8_t rest[kRows][kPiece] = {};
    for (int r = 0; r < kRows; ++r) std::copy_n(values[r] + i, count - i, rest[r]), from[r] = rest[r];
    add_piece(sums, from, x + i, stride_x, Codes::any);
  }

  [[gnu::always_inline]] static float sum_of(Floats const& lanes) {
    float values[kLanes];
    std::memcpy(values, &lanes, sizeof(lanes));
    for (int width = kLanes / 2; width > 0; width /= 2) {
      for (int i = 0; i < width; ++i) values[i] += values[i + width];
    }
    return values[0];
  }

  [[gnu::always_inline]] static void run(ScaledFloat8 const& w, std::int64_t first, std::int64_t last,
                                         Float8Tokens const& tokens) {
    for (std::int64_t row = first; row < last; row += kRows) {
      Floats sums[kRows][kTokens] = {};
      for (std::int64_t column = 0; column < w.columns; column += w.scale_columns) {
        Floats part[kRows][kTokens] = {};
        std::uint8_t const* values[kRows];
        for (int r = 0; r < kRows; ++r) values[r] = w.values + std::min(row + r, last - 1) * w.stride + column;
        add(part, values, std::min(w.scale_columns, w.columns - column), tokens.x + column, tokens.stride_x);
        for (int r = 0; r < kRows; ++r) {
          float const scale = w.scale_at(std::min(row + r, last - 1), column);
          for (int m = 0; m < kTokens; ++m) sums[r][m] += part[r][m] * scale;
        }
      }
      for (int r = 0; r < kRows && row + r < last; ++r) {
        for (int m = 0; m < tokens.count; ++m) tokens.out[m * tokens.stride_out + row + r] = sum_of(sums[r][m]);
      }
    }
  }
};

}  // namespace epiloq
