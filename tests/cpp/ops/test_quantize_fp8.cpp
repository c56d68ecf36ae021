// quantize_fp8 without a GPU: the argument checks, and what the CPU computes.

#include <algorithm>
#include <cmath>
#include <vector>

#include "check.h"
#include "epiloq/error.h"
#include "epiloq/quantize_fp8.h"

using namespace epiloq;
using test::refused;

namespace {

constexpr int kRows = 17, kCols = 100, kPadded = 112, kGroup = 32, kGroups = 4;

struct Operands {
  std::vector<float> x = std::vector<float>(kRows * kCols), scale = std::vector<float>(kRows * kGroups);
  std::vector<std::uint8_t> q = std::vector<std::uint8_t>(kRows * kPadded);
  QuantizeFp8 call{.q = {q.data(), DType::kFloat8E4M3, {}, {kRows, kPadded}},
                   .x = {x.data(), DType::kFloat32, {}, {kRows, kCols}},
                   .scale = {scale.data(), DType::kFloat32, {}, {kRows, kGroups}},
                   .granularity = Granularity::kGroup,
                   .group_size = kGroup};
};

void misfits_are_named() {
  check(Operands{}.call);
  refused<Operands>([](auto& c) { c.x.dtype = DType::kInt32; }, {"epiloq.quantize_fp8: x: expected float32"});
  refused<Operands>([](auto& c) { c.q.dtype = DType::kInt8; }, {"out: expected float8_e4m3fn or float8_e5m2"});
  refused<Operands>([](auto& c) { c.q.shape[1] = kCols - 1; }, {"expected x's leading dimensions and at least 100"});
  refused<Operands>([](auto& c) { c.scale.shape[1] = 1; },
                    {"scale: expected 68 elements for granularity group", "token"});
  refused<Operands>([](auto& c) { c.scale.strides[1] = 2; }, {"scale: expected dense rows, or dense columns"});
  refused<Operands>([](auto& c) { c.granularity = Granularity::kTensor; }, {"scale: expected 1 elements"});
  refused<Operands>([](auto& c) { c.eps = NAN; }, {"eps: expected a finite number"});
  refused<Operands>([](auto& c) { c.group_size = 0; }, {"group_size: expected a positive integer"});
  refused<Operands>([](auto& c) { c.scale_ub = c.x; }, {"scale_ub: expected one element"});
}

double e4m3(std::uint8_t code) {
  int const exponent = code >> 3 & 15, mantissa = code & 7;
  double const magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return code & 128 ? -magnitude : magnitude;
}

// Each value comes back to within half of its code's spacing: 2^-4 of it, or 2^-10 scales.
void values_come_back() {
  auto random = test::generator();
  std::normal_distribution<float> values(0.F, 3.0F);
  Operands operands;
  for (auto& value : operands.x) value = values(random);
  std::fill(operands.q.begin(), operands.q.end(), 99);
  quantize_fp8(operands.call, nullptr);
  for (int row = 0; row < kRows; ++row) {
    for (int i = 0; i < kCols; ++i) {
      double const x = operands.x[row * kCols + i], scale = operands.scale[row * kGroups + i / kGroup];
      double const error = std::abs(e4m3(operands.q[row * kPadded + i]) * scale - x);
      CHECK(error <= 1.000001 * std::max(std::abs(x) / 16, scale / 1024));
    }
    std::uint8_t const* const q = &operands.q[row * kPadded];
    CHECK(std::all_of(q + kCols, q + kPadded, [](std::uint8_t value) { return value == 0; }));
  }
}

}  // namespace

int main() {
  misfits_are_named();
  values_come_back();
  return test::failures != 0;
}
