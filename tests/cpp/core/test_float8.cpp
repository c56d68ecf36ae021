// Division by multiplication and the 8-bit codes, which the kernels and the CPU share: against what they stand for.

#include <algorithm>
#include <vector>

#include "check.h"
#include "core/float8.h"
#include "cpu/common/rows.h"

using namespace epiloq;

namespace {

float significand(std::uint32_t bits) { return std::bit_cast<float>(0x3f800000u | (bits & 0x7fffffu)); }

template <int kSteps>
EPILOQ_CLONES int differences(float const* x, int count, float scale) {
  Divisor const divisor = divide_by(scale);
  int different = 0;
  for (int i = 0; i < count; ++i) different += quotient<kSteps>(x[i], divisor) != x[i] / scale;
  return different;
}

// Every significand of `bits` bits, as bfloat16 (8) and float16 (11) have, by a sample of the scales.
// Exponents change nothing while nothing over- or underflows.
void short_significands_divide_exactly(int bits) {
  auto random = test::generator();
  std::vector<float> x;
  for (int i = 0; i < 1 << (bits - 1); ++i) x.push_back(1 + std::ldexp(static_cast<float>(i), 1 - bits));
  std::int64_t different = 0;
  for (int i = 0; i < 1 << 16; ++i)
    different += differences<1>(x.data(), static_cast<int>(x.size()), significand(random()));
  for (std::uint32_t last = 0; last < 1 << 12; ++last) {  // where reciprocals are the least exact
    different += differences<1>(x.data(), static_cast<int>(x.size()), significand(0x7fffffu - last));
  }
  CHECK_EQUAL(different, 0);
}

void whole_significands_divide_exactly() {
  auto random = test::generator();
  std::int64_t different = 0;
  std::vector<float> x(4096);
  for (int round = 0; round < 64; ++round) {
    std::uint32_t const near = random();
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = significand(round % 2 ? near + i : random());
    for (std::uint32_t i = 0; i < 512; ++i) {
      float const scale = significand(round % 4 < 2 ? random() : near + i);
      different += differences<2>(x.data(), static_cast<int>(x.size()), scale);
    }
  }
  CHECK_EQUAL(different, 0);
}

// The codes, wherever in the range that is divided quickly, beyond the largest code, below the smallest and at zero.
template <class Format, int kSteps>
void codes_are_those_of_division() {
  auto random = test::generator();
  std::uniform_int_distribution<int> exponents(-79, 99), quotients(-30, 60);
  int different = 0;
  for (int i = 0; i < 1 << 20; ++i) {
    float const scale = std::ldexp(significand(random()), exponents(random));
    int const keep = kSteps == 1 ? 0x7fe000 : 0x7fffff;
    float x = std::ldexp(significand(random() & keep), quotients(random)) * std::exp2(std::floor(std::log2(scale)));
    if (i % 64 == 0) x = 0;
    if (i % 2) x = -x;
    if (std::isinf(x)) continue;
    different += encode<Format>(quotient<kSteps>(x, divide_by(scale))) != encode<Format>(x / scale);
  }
  CHECK_EQUAL(different, 0);
}

template <class Format>
double value_of(int code) {
  int const exponent = code >> Format::kMantissaBits, mantissa = code & ((1 << Format::kMantissaBits) - 1);
  int const hidden = exponent == 0 ? 0 : 1 << Format::kMantissaBits;
  return std::ldexp(hidden + mantissa, std::max(exponent, 1) - Format::kBias - Format::kMantissaBits);
}

// Every code, every middle between two (to the even one) and the floats beside each middle.
template <class Format>
void floats_become_the_nearest_code(int largest) {
  CHECK_EQUAL(value_of<Format>(largest), Format::kMax);
  for (int code = 0; code < largest; ++code) {
    float const low = value_of<Format>(code), high = value_of<Format>(code + 1), middle = (low + high) / 2;
    CHECK_EQUAL(int{encode<Format>(low)}, code);
    CHECK_EQUAL(int{encode<Format>(-high)}, 128 + code + 1);
    CHECK_EQUAL(int{encode<Format>(middle)}, code + code % 2);
    CHECK_EQUAL(int{encode<Format>(std::nextafter(middle, 0.f))}, code);
    CHECK_EQUAL(int{encode<Format>(std::nextafter(middle, high))}, code + 1);
  }
  CHECK_EQUAL(int{encode<Format>(Format::kMax * 1.2f)}, largest);
  CHECK_EQUAL(int{encode<Format>(-INFINITY)}, 128 + largest);
  CHECK_EQUAL(int{encode<Format>(-0.f)}, 128);
  CHECK_EQUAL(int{encode<Format>(NAN)}, 0x7f);
  CHECK_EQUAL(int{encode<Format>(-NAN)}, 0x7f);
}

}  // namespace

int main() {
  short_significands_divide_exactly(8);
  short_significands_divide_exactly(11);
  whole_significands_divide_exactly();
  codes_are_those_of_division<E4M3, 1>();
  codes_are_those_of_division<E4M3, 2>();
  codes_are_those_of_division<E5M2, 1>();
  codes_are_those_of_division<E5M2, 2>();
  floats_become_the_nearest_code<E4M3>(0x7e);
  floats_become_the_nearest_code<E5M2>(0x7b);
  return test::failures != 0;
}
