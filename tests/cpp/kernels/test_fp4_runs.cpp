// Packed FP4 codes as rows, without a GPU: every code of a tile reaches its column, as a number and as float8; float8
// is exact within 2^14 of a row's largest scale and the nearest number below; scales are what their bytes mean.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "kernels/common/fp4_runs.h"
#include "packed_values.h"
#include "problems/packed_layout.h"

namespace fp4 = epiloq::ops::dequantize_fp4;
namespace wo = epiloq::ops::weight_only_mm;

namespace {

constexpr int kBits = 4, kDepth = wo::depth(kBits), kRows = wo::kPanelRows;
constexpr float kNumbers[] = {0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f};

float e2m1(int code) { return code & 8 ? -kNumbers[code & 7] : kNumbers[code]; }

// The value of an E4M3 code that is not NaN, by its definition.
double e4m3(int code) {
  int const exponent = code >> 3 & 15, fraction = code & 7;
  double const size = exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
  return code & 128 ? -size : size;
}

using Codes = std::array<std::array<int, kDepth>, kRows>;
using Words = std::array<fp4::Word, 4>;

Codes random_codes(std::mt19937& random) {
  Codes codes;
  for (auto& row : codes) {
    for (int& code : row) code = static_cast<int>(random() % 16);
  }
  return codes;
}

// A tile as packed, a lane's four words each.
std::array<Words, wo::kLanes> packed(Codes const& codes) {
  std::array<Words, wo::kLanes> lanes{};
  for (int lane = 0; lane < wo::kLanes; ++lane) {
    for (int i = 0; i < wo::lane_values(kBits); ++i) {
      wo::TileCoord const coord = wo::tile_coord_of(kBits, lane, i);
      lanes[lane][i / 8] |= static_cast<fp4::Word>(codes[coord.row][coord.column]) << 4 * (i % 8);
    }
  }
  return lanes;
}

void codes_reach_their_columns(Codes const& codes) {
  auto const lanes = packed(codes);
  for (int lane = 0; lane < wo::kLanes; ++lane) {
    fp4::Word run[4];
    for (int i = 0; i < 4; ++i) run[i] = lanes[lane / 4 * 4 + i][lane % 4];  // as the four lanes exchange them
    for (int half = 0; half < 2; ++half) {
      auto const& row = codes[lane / 4 + 8 * half];
      for (int q = 0; q < fp4::kRun / 4; ++q) {
        fp4::Word const quad = fp4::quad_of(run, q);
        for (int i = 0; i < 4; ++i) {
          float const expected = e2m1(row[lane % 4 * fp4::kRun + 4 * q + i]), found = fp4::number_at(quad, i, half);
          CHECK_EQUAL(found, expected);
          CHECK_EQUAL(std::signbit(found), std::signbit(expected));
        }
        for (int index = 0; index < fp4::kExponents; ++index) {
          std::uint8_t bytes[8];
          for (int code = 0; code < 8; ++code) bytes[code] = fp4::magnitude_of(index, code);
          fp4::Magnitudes magnitudes;
          std::memcpy(&magnitudes, bytes, sizeof(bytes));
          fp4::Word const four = fp4::float8_of(quad, half, magnitudes);
          for (int i = 0; i < 4; ++i) {
            int const code = row[lane % 4 * fp4::kRun + 4 * q + i];
            CHECK_EQUAL(static_cast<int>(four >> 8 * i & 0xff), (code & 8) << 4 | bytes[code & 7]);
          }
        }
      }
    }
  }
}

// Exact from 2^-14 of the largest scale on; below, within half of float8's smallest number; the largest is finite.
void magnitudes_are_the_nearest() {
  constexpr int kRange = 14;
  for (int largest : {0, 1, 6, 20, 127, 200, 254}) {
    for (int e = 0; e <= largest; ++e) {
      int const index = fp4::exponent_index(e, largest);
      for (int code = 0; code < 8; ++code) {
        double const exact = std::ldexp(kNumbers[code], e - largest + fp4::kLargestExponent);
        double const found = e4m3(fp4::magnitude_of(index, code));
        double const bound = largest - e <= kRange ? 0. : std::ldexp(1., -10);
        CHECK(std::abs(found - exact) <= bound);
      }
    }
  }
  for (int e : {128, 200, 254}) CHECK_EQUAL(fp4::exponent_index(e, 127), fp4::kExponents - 1);  // blocks of zeros
  CHECK_EQUAL(e4m3(fp4::magnitude_of(fp4::exponent_index(127, 127), 7)), 6. * 64);
}

void scales_are_what_bytes_mean() {
  for (int byte = 0; byte < 255; ++byte) CHECK_EQUAL(fp4::e8m0_number(byte), std::ldexp(1.f, byte - 127));
  CHECK(std::isnan(fp4::e8m0_number(255)));
  // Every E4M3 number that is not negative, times 128 a half whose low seven bits are 0.
  for (int code = 0; code < 127; ++code) {
    double const scale = e4m3(code), half = 128 * scale;
    int exponent = 0;
    double const fraction = std::frexp(half, &exponent);  // half = fraction 2^exponent, fraction from 0.5 to 1
    int const byte = half == 0 ? 0 : (exponent + 14) * 8 + static_cast<int>(fraction * 16) - 8;
    CHECK_EQUAL(static_cast<double>(fp4::nvfp4_number(byte)), scale);
  }
  constexpr int kNan = 0x7e00 >> 7;
  CHECK(std::isnan(fp4::nvfp4_number(kNan)));
}

}  // namespace

int main() {
  std::random_device seed;
  std::mt19937 random(seed());
  for (int i = 0; i < 8; ++i) codes_reach_their_columns(random_codes(random));
  magnitudes_are_the_nearest();
  scales_are_what_bytes_mean();
  return test::failures != 0;
}
