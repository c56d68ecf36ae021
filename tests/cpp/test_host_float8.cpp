// float8's kernels of the CPU in every width of vectors, whichever this machine's registers have.

#include <cmath>
#include <limits>
#include <vector>

#include "check.h"
#include "core/host_float8_pairs.h"
#include "epiloq/error.h"
#include "epiloq/host_float8.h"

namespace epiloq {
namespace {

template <class Format>
float value_of(int code) {
  int const mantissa = code & ((1 << Format::kMantissaBits) - 1), exponent = (code & 0x7f) >> Format::kMantissaBits;
  float const sign = code & 0x80 ? -1.f : 1.f;
  if (Format::kMantissaBits == 3 && (code & 0x7f) == 0x7f) return std::numeric_limits<float>::quiet_NaN();
  if (Format::kMantissaBits == 2 && exponent == 31) {
    return mantissa == 0 ? sign * std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
  }
  int const least = 1 - Format::kBias - Format::kMantissaBits;
  int const whole = exponent == 0 ? mantissa : mantissa + (1 << Format::kMantissaBits);
  return sign * std::ldexp(static_cast<float>(whole), exponent == 0 ? least : least + exponent - 1);
}

bool same(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

ScaledFloat8 matrix(std::vector<std::uint8_t> const& codes, int rows, int columns) {
  return {codes.data(), rows, columns, columns, false, nullptr, rows, columns, 0, 0};
}

// Every code, in a row whose end is no whole vector.
template <class Format, int kLanes>
void test_values() {
  constexpr int kCodes = 256, kColumns = kCodes + 5;
  std::vector<std::uint8_t> codes(kColumns);
  for (int i = 0; i < kColumns; ++i) codes[i] = static_cast<std::uint8_t>(i);
  std::vector<float> out(kColumns + 1, 7.f);
  WidenFloat8<Format, kLanes>::run(matrix(codes, 1, kColumns), 0, 1, out.data(), kColumns);
  for (int i = 0; i < kColumns; ++i) CHECK(same(out[i], value_of<Format>(codes[i])));
  CHECK_EQUAL(out[kColumns], 7.f);
}

// Small integers, exactly, in rows of normal codes and of all finite ones.
template <class Format, int kLanes, int kTokens>
void test_products(int rows, int columns, int smallest) {
  int const padded = (columns + 4 * kLanes - 1) / (4 * kLanes) * 4 * kLanes, piece = 4 * kLanes;
  constexpr int kEnd = Format::kMantissaBits == 3 ? 0x7f : 0x7c;
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(rows) * columns);
  auto random = test::generator();
  for (auto& code : codes) {
    int const size = smallest + static_cast<int>(random() % (kEnd - smallest));
    code = static_cast<std::uint8_t>(size | (random() & 0x80));
  }
  std::vector<float> x(static_cast<std::size_t>(kTokens) * padded, 0.f), out(kTokens * rows, 7.f);
  for (int m = 0; m < kTokens; ++m) {
    for (int i = 0; i < columns; ++i) {
      x[m * padded + i / piece * piece + i % 4 * kLanes + i % piece / 4] = static_cast<float>((i * 7 + m) % 5 - 2);
    }
  }
  Float8Tokens const tokens{x.data(), padded, kTokens, out.data(), rows};
  MultiplyFloat8<Format, kLanes, kTokens>::run(matrix(codes, rows, columns), 0, rows, tokens);
  for (int m = 0; m < kTokens; ++m) {
    for (int r = 0; r < rows; ++r) {
      double sum = 0, size = 0;
      for (int i = 0; i < columns; ++i) {
        double const term = value_of<Format>(codes[r * columns + i]) * double((i * 7 + m) % 5 - 2);
        sum += term, size += std::fabs(term);
      }
      CHECK(std::fabs(out[m * rows + r] - sum) <= 1e-6 * size);
    }
  }
}

template <class Format, int kLanes>
void test_all() {
  test_values<Format, kLanes>();
  for (int smallest : {0, 1 << Format::kMantissaBits}) {
    for (int rows : {1, 3, 4, 9}) {
      for (int columns : {1, 16, 63, 64, 65, 300}) {
        test_products<Format, kLanes, 1>(rows, columns, smallest);
        test_products<Format, kLanes, 2>(rows, columns, smallest);
        test_products<Format, kLanes, 4>(rows, columns, smallest);
      }
    }
  }
}

#ifdef EPILOQ_HAS_CLONES
// Many rows by 16 of a matrix, by pairs and in tiles of them, with scales of every 128 columns.
template <class Format>
void test_many(int tokens, int rows, int columns, bool in_tiles) {
  constexpr int kEnd = Format::kMantissaBits == 3 ? 0x7f : 0x7c;
  auto random = test::generator();
  auto const codes_of = [&](int count) {
    std::vector<std::uint8_t> codes(static_cast<std::size_t>(count) * columns);
    for (auto& code : codes) code = static_cast<std::uint8_t>(random() % kEnd | (random() & 0x80));
    return codes;
  };
  std::vector<std::uint8_t> const a = codes_of(tokens), b = codes_of(rows);
  ScaledFloat8 const x = matrix(a, tokens, columns), w = matrix(b, rows, columns);
  int const pieces = (columns + kFloat8Columns - 1) / kFloat8Columns, block = in_tiles ? kTileRows : kPairBlock;
  int const pairs = in_tiles ? (columns + kTileColumns - 1) / kTileColumns * kTilePairs : (columns + 1) / 2;
  std::vector<float> scales(pieces * tokens);
  for (auto& scale : scales) scale = static_cast<float>(1 + random() % 7);
  std::vector<std::uint32_t> words((tokens + block - 1) / block * block * pairs);
  for (int m = 0; m < tokens; ++m) {
    in_tiles ? ManyFloat8<Format>::bring_row(x, m, words.data() + m * pairs)
             : ManyFloat8<Format>::bring(x, m, words.data());
  }
  for (int row = 0; row < rows; row += 16) {
    std::vector<Line> sums(tokens + 1);
    sums[tokens].values[0] = 7.f;
    if (in_tiles) {
      TokensOfTiles const some{reinterpret_cast<std::uint16_t const*>(words.data()), 2 * pairs, tokens};
      ManyFloat8<Format>::run_in_tiles(w, row, some, scales.data(), tokens, sums.data());
    } else {
      ManyFloat8<Format>::run(w, row, {words.data(), scales.data(), tokens, tokens}, sums.data());
    }
    CHECK_EQUAL(sums[tokens].values[0], 7.f);
    for (int m = 0; m < tokens; ++m) {
      for (int r = row; r < std::min(rows, row + 16); ++r) {
        double sum = 0, size = 0;
        for (int i = 0; i < columns; ++i) {
          double const term = static_cast<double>(value_of<Format>(a[m * columns + i])) *
                              value_of<Format>(b[r * columns + i]) * scales[i / kFloat8Columns * tokens + m];
          sum += term, size += std::fabs(term);
        }
        CHECK(std::fabs(sums[m].values[r - row] - sum) <= 2e-6 * size);
      }
    }
  }
}

void test_many_of_all_kinds() {
  for (int tokens : {1, 12, 16, 17, 37, 70}) {
    for (int columns : {1, 31, 32, 127, 128, 129, 300}) {
      for (bool in_tiles : {false, true}) {
        if (in_tiles ? !has_pair_tiles() : !has_pairs()) continue;
        test_many<E4M3>(tokens, 19, columns, in_tiles);
        test_many<E5M2>(tokens, 19, columns, in_tiles);
      }
    }
  }
}
#endif

void test_refusals() {
  std::vector<float> memory(64);
  TensorView const out(memory.data(), DType::kFloat32, {}, {1, 4}), x(memory.data() + 32, DType::kFloat32, {}, {1, 8});
  std::uint8_t codes[32] = {};
  HostFloat8 const matrix{{codes, DType::kFloat8E4M3, {}, {4, 8}}};
  HostFloat8 const elsewhere{{codes, DType::kFloat8E4M3, {Device::Type::kCuda, 0}, {4, 8}}};
  HostFloat8 const inside{{memory.data(), DType::kFloat8E4M3, {}, {4, 8}}};
  CHECK_THROWS(InvalidArgument, multiply_float8(out, x, elsewhere, 1), "values: expected a tensor on the CPU");
  CHECK_THROWS(InvalidArgument, multiply_float8(out, x, inside, 1), "out: expected");
  CHECK_THROWS(InvalidArgument, multiply_float8(out, {memory.data(), DType::kFloat32, {}, {1, 8}}, matrix, 1),
               "out: expected");
  memory[0] = 7;
  multiply_float8(out, x, matrix, 0);
  CHECK_EQUAL(memory[0], 0.f);
}

}  // namespace
}  // namespace epiloq

int main() {
  epiloq::test_refusals();
  epiloq::test_all<epiloq::E4M3, 4>();
  epiloq::test_all<epiloq::E4M3, 8>();
  epiloq::test_all<epiloq::E4M3, 16>();
  epiloq::test_all<epiloq::E5M2, 4>();
  epiloq::test_all<epiloq::E5M2, 8>();
  epiloq::test_all<epiloq::E5M2, 16>();
#ifdef EPILOQ_HAS_CLONES
  epiloq::test_many_of_all_kinds();
#endif
  return test::failures != 0;
}
