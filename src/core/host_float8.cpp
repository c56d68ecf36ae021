// float8 on the CPU: a vector of bytes becomes a vector of floats by a shift of its bits and two exceptions.

#include "epiloq/host_float8.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "core/checks.h"
#include "core/float8.h"
#include "core/host_rows.h"
#include "core/host_vectors.h"
#include "core/threads.h"

namespace epiloq {
namespace {

using SignedBytes [[gnu::vector_size(kWidth)]] = std::int8_t;
using SignedShorts [[gnu::vector_size(2 * kWidth)]] = std::int16_t;

template <class Format>
struct Code {
  static constexpr int kDropped = 23 - Format::kMantissaBits;
  static constexpr int kBias = (127 - Format::kBias) << 23;
  static constexpr int kSmallest = 1 << Format::kMantissaBits;                // that has an exponent
  static constexpr int kEnd = Format::kMantissaBits == 3 ? 0x7f : 0x1f << 2;  // from here on NaN, or infinite
};

// Codes at the top of their lanes: sign, exponent and mantissa move to their places in a float. What has an exponent
// and is finite,
template <class Format>
[[gnu::always_inline]] inline void normal_values(Floats& out, Ints const& codes) {
  constexpr int kPlaces = static_cast<int>(0x80000000u | 0x7fu << Code<Format>::kDropped);
  out = (Floats)(((codes >> (24 - Code<Format>::kDropped)) & kPlaces) + Code<Format>::kBias);
}

// or anything: without an exponent, a multiple of the smallest number is 1 + m there and should be 2 m.
template <class Format>
[[gnu::always_inline]] inline void any_values(Floats& out, Ints const& codes) {
  using C = Code<Format>;
  constexpr float kUnit = std::bit_cast<float>(C::kBias + (1 << 23));
  Ints const code = codes >> 24 & 0x7f, sign = codes & static_cast<int>(0x80000000u);
  Ints bits = (code << C::kDropped) + C::kBias;
  Floats const normal = (Floats)bits, subnormal = normal + normal - kUnit;
  bits = code < C::kSmallest ? (Ints)subnormal : bits;
  // Infinities have no mantissa.
  Ints const largest = (code << C::kDropped) | (C::kEnd == 0x7f ? 0x7fc00000 : 0x7f800000);
  bits = code >= C::kEnd ? largest : bits;
  out = (Floats)(bits | sign);
}

// Columns that are looked at together for whether all are normal.
constexpr int kPiece = 4 * kWidth;
using Words [[gnu::vector_size(kPiece)]] = std::uint64_t;

[[gnu::always_inline]] inline std::uint64_t of_bytes(std::uint64_t byte) { return 0x0101010101010101u * byte; }

// Bit 7 of each byte stays where a code has an exponent and is finite.
template <class Format>
[[gnu::always_inline]] inline void keep_normal(Words& kept, std::uint8_t const* from) {
  Words codes;
  load(codes, from);
  codes &= of_bytes(0x7f);
  kept &= (codes + of_bytes(0x80 - Code<Format>::kSmallest)) & ~(codes + of_bytes(0x80 - Code<Format>::kEnd));
}
[[gnu::always_inline]] inline bool all_normal(Words const& kept) {
  std::uint64_t words[kPiece / 8], all = ~std::uint64_t{};
  std::memcpy(words, &kept, sizeof(words));
  for (std::uint64_t word : words) all &= word;
  return (all & of_bytes(0x80)) == of_bytes(0x80);
}

// A run of a row's values under one scale.
struct Run {
  std::uint8_t const* values;
  int count;
  float scale;
};

template <class Format>
[[gnu::always_inline]] inline void widen_vector(Floats& out, std::uint8_t const* values, float scale) {
  SignedBytes bytes;
  load(bytes, values);
  // In two steps: gcc 12 makes one of four a byte at a time.
  any_values<Format>(out, __builtin_convertvector(__builtin_convertvector(bytes, SignedShorts), Ints) << 24);
  out *= scale;
}

template <class Format>
[[gnu::always_inline]] inline void widen_run(Run const& run, float* out) {
  Floats x;
  int i = 0;
  for (; i + kWidth <= run.count; i += kWidth) {
    widen_vector<Format>(x, run.values + i, run.scale);
    std::memcpy(out + i, &x, sizeof(x));
  }
  if (i == run.count) return;
  std::uint8_t rest[kWidth] = {};
  std::copy_n(run.values + i, run.count - i, rest);
  widen_vector<Format>(x, rest, run.scale);
  std::memcpy(out + i, &x, (run.count - i) * sizeof(float));
}

EPILOQ_CLONES void widen_e4m3(Run const& run, float* out) { widen_run<E4M3>(run, out); }
EPILOQ_CLONES void widen_e5m2(Run const& run, float* out) { widen_run<E5M2>(run, out); }

// Rows of the matrix by rows of x: kRows * kTokens sums of 16 lanes fit the registers of every instruction set.
constexpr int kSums = 4;
constexpr int kTokenBlocks[] = {1, 2, 4};

// Columns of some rows under one scale each.
struct Panel {
  std::uint8_t const* values[kSums];
  float scales[kSums];
  int count;
  float const* x;  // [tokens, stride_x], in_order
  std::int64_t stride_x;
};

// sums [rows, tokens] += scale * (values . x), lane by lane.
template <class Format, int kTokens>
[[gnu::always_inline]] inline void multiply_panel(Panel const& p, Floats* sums) {
  constexpr int kRows = kSums / kTokens;
  Floats part[kRows][kTokens] = {};
  auto const add_piece = [&](int first, auto const& from, auto const& values_of) __attribute__((always_inline)) {
    for (int r = 0; r < kRows; ++r) {
      Ints words;
      load(words, from(r));
#pragma GCC unroll 4
      for (int byte = 0; byte < 4; ++byte) {
        Floats weight, x;
        values_of(weight, words << (24 - 8 * byte));
        for (int m = 0; m < kTokens; ++m) {
          load(x, p.x + m * p.stride_x + first + byte * kWidth);
          part[r][m] += weight * x;
        }
      }
    }
  };
  int i = 0;
  for (; i + kPiece <= p.count; i += kPiece) {
    auto const from = [&](int r) { return p.values[r] + i; };
    Words kept = ~Words{};
    for (int r = 0; r < kRows; ++r) keep_normal<Format>(kept, from(r));
    if (all_normal(kept)) {
      add_piece(i, from, normal_values<Format>);
    } else {
      add_piece(i, from, any_values<Format>);
    }
  }
  if (i < p.count) {
    std::uint8_t rest[kRows][kPiece] = {};
    for (int r = 0; r < kRows; ++r) std::copy_n(p.values[r] + i, p.count - i, rest[r]);
    add_piece(i, [&](int r) { return rest[r]; }, any_values<Format>);
  }
  for (int r = 0; r < kRows; ++r) {
    for (int m = 0; m < kTokens; ++m) sums[r * kTokens + m] += part[r][m] * p.scales[r];
  }
}

using MultiplyPanel = void (*)(Panel const&, Floats*);
#define EPILOQ_PANEL(name, format, tokens) \
  EPILOQ_CLONES void name(Panel const& p, Floats* sums) { multiply_panel<format, tokens>(p, sums); }
EPILOQ_PANEL(e4m3_by_1, E4M3, 1)
EPILOQ_PANEL(e4m3_by_2, E4M3, 2)
EPILOQ_PANEL(e4m3_by_4, E4M3, 4)
EPILOQ_PANEL(e5m2_by_1, E5M2, 1)
EPILOQ_PANEL(e5m2_by_2, E5M2, 2)
EPILOQ_PANEL(e5m2_by_4, E5M2, 4)
#undef EPILOQ_PANEL
constexpr MultiplyPanel kPanels[2][3] = {{e4m3_by_1, e4m3_by_2, e4m3_by_4}, {e5m2_by_1, e5m2_by_2, e5m2_by_4}};

struct Matrix8 {
  std::uint8_t const* values;
  std::int64_t rows, columns, stride;
  bool is_e5m2;
  float const* scale;  // or null
  std::int64_t scale_rows, scale_columns, scale_stride_row, scale_stride_column;

  Matrix8(Checker const& check, HostFloat8 const& m)
      : values(m.values.as<std::uint8_t>()), is_e5m2(m.values.dtype == DType::kFloat8E5M2) {
    check.tensor("values", m.values, {DType::kFloat8E4M3, DType::kFloat8E5M2});
    Matrix const matrix = check.rows("values", m.values);
    rows = matrix.rows, columns = matrix.cols, stride = matrix.stride;
    scale = nullptr, scale_rows = std::max<std::int64_t>(rows, 1), scale_columns = std::max<std::int64_t>(columns, 1);
    scale_stride_row = scale_stride_column = 0;
    if (!m.scale) return;
    TensorView const& s = *m.scale;
    check.tensor("scale", s, {DType::kFloat32});
    scale = s.as<float>(), scale_rows = m.scale_rows, scale_columns = m.scale_columns;
    bool const fits = s.rank == 2 && scale_rows > 0 && scale_columns > 0 && scale_columns % kPiece == 0 &&
                      s.size(0) == (rows + scale_rows - 1) / scale_rows &&
                      s.size(1) == (columns + scale_columns - 1) / scale_columns;
    if (!fits) check.fail("scale", "expected one for each block of the values, got ", describe(s));
    scale_stride_row = s.stride(0), scale_stride_column = s.stride(1);
  }
  float scale_at(std::int64_t row, std::int64_t column) const {
    if (scale == nullptr) return 1.f;
    return scale[row / scale_rows * scale_stride_row + column / scale_columns * scale_stride_column];
  }
};

Matrix floats(Checker const& check, char const* name, TensorView const& view, std::int64_t rows, std::int64_t columns) {
  check.tensor(name, view, {DType::kFloat32});
  Matrix const matrix = check.rows(name, view);
  if (view.rank != 2 || matrix.rows != rows || matrix.cols != columns) {
    check.fail(name, "expected [", rows, ", ", columns, "], got ", describe(view));
  }
  return matrix;
}

int threads_for(std::int64_t elements, int threads) {
  constexpr std::int64_t kWorth = 1 << 15;  // waking a thread, which takes a few microseconds
  return static_cast<int>(std::clamp<std::int64_t>(elements / kWorth, 1, std::max(threads, 1)));
}

float sum_of(Floats const& lanes) {
  float values[kWidth];
  std::memcpy(values, &lanes, sizeof(lanes));
  for (int width = kWidth / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) values[i] += values[i + width];
  }
  return values[0];
}

// A row of x as the bytes of words are taken: of each piece the columns 0, 4, 8 .., then 1, 5, 9 .. and so on.
void in_order(float const* x, std::int64_t columns, float* out) {
  for (std::int64_t i = 0; i < columns; ++i) out[i / kPiece * kPiece + i % 4 * kWidth + i % kPiece / 4] = x[i];
}

// Some rows of x, in_order, zeros past their ends.
struct Block {
  float const* x;
  std::int64_t stride_x;
  int tokens, index;  // in kTokenBlocks
  float* out;
  std::int64_t stride_out;
};

void multiply_rows(Matrix8 const& w, Block const& block, std::int64_t first, std::int64_t last) {
  int const tokens = kTokenBlocks[block.index], at_once = kSums / tokens;
  MultiplyPanel const panel = kPanels[w.is_e5m2][block.index];
  for (std::int64_t row = first; row < last; row += at_once) {
    Floats sums[kSums] = {};
    for (std::int64_t column = 0; column < w.columns; column += w.scale_columns) {
      Panel p{
          {}, {}, static_cast<int>(std::min(w.scale_columns, w.columns - column)), block.x + column, block.stride_x};
      for (int r = 0; r < at_once; ++r) {
        std::int64_t const at = std::min(row + r, last - 1);
        p.values[r] = w.values + at * w.stride + column, p.scales[r] = w.scale_at(at, column);
      }
      panel(p, sums);
    }
    for (int r = 0; r < at_once && row + r < last; ++r) {
      for (int m = 0; m < block.tokens; ++m) {
        block.out[m * block.stride_out + row + r] = sum_of(sums[r * tokens + m]);
      }
    }
  }
}

}  // namespace

void widen(TensorView const& out, HostFloat8 const& matrix, int threads) {
  Checker const check("widen", matrix.values.device);
  Matrix8 const w(check, matrix);
  Matrix const target = floats(check, "out", out, w.rows, w.columns);
  auto* const widen_run = w.is_e5m2 ? widen_e5m2 : widen_e4m3;
  share(static_cast<int>(w.rows), threads_for(w.rows * w.columns, threads), [&](int first, int last) {
    for (std::int64_t row = first; row < last; ++row) {
      for (std::int64_t column = 0; column < w.columns; column += w.scale_columns) {
        int const count = static_cast<int>(std::min(w.scale_columns, w.columns - column));
        widen_run({w.values + row * w.stride + column, count, w.scale_at(row, column)},
                  out.as<float>() + row * target.stride + column);
      }
    }
  });
}

void multiply(TensorView const& out, TensorView const& x, HostFloat8 const& matrix, int threads) {
  Checker const check("multiply", matrix.values.device);
  Matrix8 const w(check, matrix);
  std::int64_t const m = x.rank == 2 ? x.size(0) : 0, padded = (w.columns + kPiece - 1) / kPiece * kPiece;
  Matrix const source = floats(check, "x", x, m, w.columns), target = floats(check, "out", out, m, w.rows);
  std::vector<float> tokens;
  for (std::int64_t first = 0; first < m; first += kSums) {
    int const count = static_cast<int>(std::min<std::int64_t>(kSums, m - first));
    int const index = count == 1 ? 0 : count == 2 ? 1 : 2;
    tokens.assign(kTokenBlocks[index] * padded, 0.f);
    for (int i = 0; i < count; ++i) {
      in_order(x.as<float>() + (first + i) * source.stride, w.columns, tokens.data() + i * padded);
    }
    Block const block{tokens.data(), padded, count, index, out.as<float>() + first * target.stride, target.stride};
    share(static_cast<int>(w.rows), threads_for(w.rows * w.columns, threads),
          [&](int begin, int end) { multiply_rows(w, block, begin, end); });
  }
}

}  // namespace epiloq
