// float8's kernels of the CPU in every width of vectors, whichever this machine's registers have, and every way that
// this machine has to multiply.

#include <cmath>
#include <limits>
#include <vector>

#include "check.h"
#include "cpu/gemm/float8_avx512_bf16.h"
#include "cpu/gemm/float8_avx512_columns.h"
#include "cpu/gemm/float8_vectors.h"

namespace epiloq {
namespace {

float value_of(int code, bool is_e5m2) {
  int const bits = is_e5m2 ? 2 : 3, bias = is_e5m2 ? 15 : 7;
  int const mantissa = code & ((1 << bits) - 1), exponent = (code & 0x7f) >> bits;
  float const sign = code & 0x80 ? -1.f : 1.f;
  if (!is_e5m2 && (code & 0x7f) == 0x7f) return std::numeric_limits<float>::quiet_NaN();
  if (is_e5m2 && exponent == 31) {
    return mantissa == 0 ? sign * std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
  }
  int const least = 1 - bias - bits, whole = exponent == 0 ? mantissa : mantissa + (1 << bits);
  return sign * std::ldexp(static_cast<float>(whole), exponent == 0 ? least : least + exponent - 1);
}

bool same(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

// Finite codes, of a size or more, in rows that lie apart, with the scales of blocks or none.
struct Operand {
  int rows, columns, stride;
  bool is_e5m2;
  std::vector<std::uint8_t> codes;
  std::vector<float> scales;
  std::vector<double> values;  // [rows, columns], of scaled codes
  int shift;

  Operand(std::mt19937& random, int r, int c, bool e5m2, int smallest = 0, bool has_scales = false)
      : rows(r), columns(c), stride(c + static_cast<int>(random() % 9)), is_e5m2(e5m2), shift(random() % 2 ? 7 : 0) {
    int const end = is_e5m2 ? 0x7c : 0x7f;
    codes.resize(static_cast<std::size_t>(rows) * stride, 0x7f);  // NaN beside a row
    for (int i = 0; i < rows * columns; ++i) {
      int const size = smallest + static_cast<int>(random() % (end - smallest));
      codes[i / columns * stride + i % columns] = static_cast<std::uint8_t>(size | (random() & 0x80));
    }
    if (has_scales) scales.resize((((rows - 1) >> shift) + 1) * k_blocks());
    for (auto& scale : scales) scale = static_cast<float>(1 + random() % 7);
    ScaledFloat8 const matrix = view();
    for (int i = 0; i < rows * columns; ++i) {
      int const row = i / columns, column = i % columns;
      double const value = value_of(codes[row * stride + column], is_e5m2);
      values.push_back(value * matrix.scale_at(row, column / kFloat8Columns));
    }
  }
  int k_blocks() const { return (columns + kFloat8Columns - 1) / kFloat8Columns; }
  // Scales of a column of blocks lie side by side.
  ScaledFloat8 view() const {
    ScaledFloat8 matrix{codes.data(), rows, columns, stride, is_e5m2};
    if (scales.empty()) return matrix;
    matrix.scale = scales.data(), matrix.scale_shift = shift;
    matrix.scale_stride_row = 1, matrix.scale_stride_column = ((rows - 1) >> shift) + 1;
    return matrix;
  }
  double at(int row, int column) const { return values[row * columns + column]; }
};

struct Exact {
  double sum = 0, size = 0;

  Exact(Operand const& x, Operand const& w, int m, int n) {
    for (int i = 0; i < x.columns; ++i) {
      double const term = x.at(m, i) * w.at(n, i);
      sum += term, size += std::fabs(term);
    }
  }
  bool is_near(float found) const { return std::fabs(found - sum) <= 2e-6 * size; }
};

// Every code, in a row whose end is no whole vector.
template <class Format, int kLanes>
void test_values() {
  constexpr int kCodes = 256, kColumns = kCodes + 5;
  constexpr bool kIsE5M2 = Format::kMantissaBits == 2;
  std::vector<std::uint8_t> codes(kColumns);
  for (int i = 0; i < kColumns; ++i) codes[i] = static_cast<std::uint8_t>(i);
  std::vector<float> out(kColumns + 1, 7.f);
  WidenFloat8<Format, kLanes>::row({codes.data(), 1, kColumns, kColumns, kIsE5M2}, 0, out.data());
  for (int i = 0; i < kColumns; ++i) CHECK(same(out[i], value_of(codes[i], kIsE5M2)));
  CHECK_EQUAL(out[kColumns], 7.f);
}

// Both kernels of a width, by rows of normal codes and of all finite ones.
template <class Format, int kLanes>
void test_floats(std::mt19937& random, int tokens, int rows, int columns, int smallest) {
  Operand const x(random, tokens, columns, false), w(random, rows, columns, Format::kMantissaBits == 2, smallest, true);
  int const stride = (columns + 63) / 64 * 64, up_to = (tokens + 15) / 16 * 16;
  std::vector<float> lying(up_to * stride), ordered(up_to * stride);
  for (int m = 0; m < tokens; ++m) {
    for (int i = 0; i < columns; ++i) lying[m * stride + i] = static_cast<float>(x.at(m, i));
    SmallMFloat8<Format, kLanes>::arrange(&lying[m * stride], columns, &ordered[m * stride]);
  }
  for (int row = 0; row < rows; row += 16) {
    std::vector<Line> few(up_to), many(tokens + 1);
    many[tokens].values[0] = 7.f;
    SmallMFloat8<Format, kLanes>::run(w.view(), row, {ordered.data(), stride, tokens}, few.data());
    LargeMFloat8<Format, kLanes>::run(w.view(), row, {lying.data(), stride, tokens}, many.data());
    CHECK_EQUAL(many[tokens].values[0], 7.f);
    for (int m = 0; m < tokens; ++m) {
      for (int n = row; n < std::min(rows, row + 16); ++n) {
        Exact const exact(x, w, m, n);
        CHECK(exact.is_near(few[m].values[n - row]));
        CHECK(exact.is_near(many[m].values[n - row]));
      }
    }
  }
}

template <class Format, int kLanes>
void test_width() {
  test_values<Format, kLanes>();
  auto random = test::generator();
  for (int smallest : {0, 1 << Format::kMantissaBits}) {
    for (int tokens : {1, 2, 3, 4, 7, 13}) {
      for (int columns : {1, 16, 63, 64, 65, 300}) {
        test_floats<Format, kLanes>(random, tokens, 1 + static_cast<int>(random() % 35), columns, smallest);
      }
    }
  }
}

// Every output once, by one thread, and what lies around it not at all.
void test_way(Float8Routine const& way, Operand const& x, Operand const& w) {
  std::vector<float> out(x.rows * w.rows, std::numeric_limits<float>::quiet_NaN());
  std::vector<int> written(out.size());
  way.multiply(x.view(), w.view(), 1, [&](Float8Sums const& sums) {
    for (int m = 0; m < sums.count; ++m) {
      for (int n = 0; n < sums.columns; ++n) {
        int const at = (sums.row + m) * w.rows + sums.column + n;
        out[at] = sums.values[m * sums.stride + n], ++written[at];
      }
    }
  });
  for (int m = 0; m < x.rows; ++m) {
    for (int n = 0; n < w.rows; ++n) {
      CHECK_EQUAL(written[m * w.rows + n], 1);
      CHECK(Exact(x, w, m, n).is_near(out[m * w.rows + n]));
    }
  }
}

void test_ways() {
  auto random = test::generator();
  for (int tokens : {1, 2, 3, 5, 8, 9, 16, 17, 33, 70, 200}) {
    for (int columns : {0, 1, 9, 20, 31, 33, 63, 64, 65, 79, 127, 128, 129, 143, 255, 266, 300, 700}) {
      bool const of_x = random() % 2, of_w = random() % 2;
      Operand const x(random, tokens, columns, random() % 2, 0, of_x && columns > 0);
      Operand const w(random, 1 + static_cast<int>(random() % 70), columns, random() % 2, 0, of_w && columns > 0);
      for (Float8Routine const& way : float8_routines()) {
        if (way.is_here()) test_way(way, x, w);
      }
    }
  }
  // More columns than tokens go through together, and more tokens.
  for (auto const& [tokens, columns] : {std::pair{130, 9000}, {300, 2100}}) {
    Operand const x(random, tokens, columns, false), w(random, 33, columns, false, 0, true);
    for (Float8Routine const& way : float8_routines()) {
      if (way.is_here()) test_way(way, x, w);
    }
  }
}

// Rows of each code by a unit vector: the value as it is, and NaN from infinities and NaN.
void test_every_code() {
  constexpr int kCodes = 256, kColumns = 64;
  std::vector<std::uint8_t> codes(kCodes * kColumns), unit(3 * kColumns);
  for (int i = 0; i < kCodes * kColumns; ++i) codes[i] = static_cast<std::uint8_t>(i / kColumns);
  for (int m = 0; m < 3; ++m) unit[m * kColumns + 7 + m] = 0x38;  // 1 in E4M3
  for (bool is_e5m2 : {false, true}) {
    ScaledFloat8 const w{codes.data(), kCodes, kColumns, kColumns, is_e5m2}, x{unit.data(), 3, kColumns, kColumns};
    for (Float8Routine const& way : float8_routines()) {
      if (!way.is_here()) continue;
      way.multiply(x, w, 1, [&](Float8Sums const& sums) {
        for (int m = 0; m < sums.count; ++m) {
          for (int n = 0; n < sums.columns; ++n) {
            float const value = value_of(sums.column + n, is_e5m2), found = sums.values[m * sums.stride + n];
            CHECK(std::isfinite(value) ? found == value : std::isnan(found));
          }
        }
      });
    }
  }
}

#ifdef EPILOQ_HAS_CLONES
// bfloat16 tokens of float8 numbers lie in every kernel's order as float8 tokens do, so that kernels multiply them
// alike.
void test_bfloat16_lies_as_float8() {
  auto random = test::generator();
  constexpr int kTokens = 3 * 16 * kPairBlock;  // whole blocks and tiles
  for (int columns : {1, 31, 64, 65, 127, 128, 200}) {
    Operand const codes(random, kTokens, columns, false);
    std::vector<std::uint16_t> numbers(kTokens * (columns + 3), 0x7fc0);  // NaN beside a row
    for (int m = 0; m < kTokens; ++m) {
      for (int k = 0; k < columns; ++k) {
        auto const bits = std::bit_cast<std::uint32_t>(static_cast<float>(codes.at(m, k)));
        numbers[m * (columns + 3) + k] = static_cast<std::uint16_t>(bits >> 16);
      }
    }
    ScaledFloat8 const x = codes.view();
    FloatRows const rows{numbers.data(), DType::kBFloat16, kTokens, columns, columns + 3};
    auto const are_equal = [](auto const& a, auto const& b) {
      return std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0;
    };
    for (int m = 0; m < kTokens; ++m) {
      std::vector<Line> one(RowsByTokens::lines(columns)), other(one.size());
      RowsByTokens::arrange(x, m, one.data()), RowsByTokens::arrange(rows, m, other.data());
      CHECK(are_equal(one, other));
    }
    for (int block = 0; block < kTokens / kPairBlock; ++block) {
      std::vector<std::uint32_t> one(ColumnsByTokenBlocks::words(columns) * kPairBlock), other(one.size());
      ColumnsByTokenBlocks::arrange(x, block, one.data()), ColumnsByTokenBlocks::arrange(rows, block, other.data());
      CHECK(are_equal(one, other));
    }
    TokenTiles const tiles{Float8InTiles::lines(columns), kTokens};
    std::vector<Line> one(tiles.size()), other(one.size());
    for (int tile = 0; tile < tiles.count(); ++tile) {
      Float8InTiles::arrange(x, tiles, tile, one.data()), Float8InTiles::arrange(rows, tiles, tile, other.data());
    }
    CHECK(are_equal(one, other));
  }
}
#endif

}  // namespace
}  // namespace epiloq

int main() {
  epiloq::test_width<epiloq::E4M3, 4>();
  epiloq::test_width<epiloq::E4M3, 8>();
  epiloq::test_width<epiloq::E4M3, 16>();
  epiloq::test_width<epiloq::E5M2, 4>();
  epiloq::test_width<epiloq::E5M2, 8>();
  epiloq::test_width<epiloq::E5M2, 16>();
  epiloq::test_ways();
  epiloq::test_every_code();
#ifdef EPILOQ_HAS_CLONES
  if (epiloq::has_lookups()) epiloq::test_bfloat16_lies_as_float8();
#endif
  return test::failures != 0;
}
