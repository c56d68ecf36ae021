// quantize_int8 without a GPU: the argument checks, and what the CPU computes.

#include <algorithm>
#include <cmath>
#include <vector>

#include "check.h"
#include "epiloq/error.h"
#include "epiloq/quantize_int8.h"

using namespace epiloq;
using test::refused;

namespace {

constexpr int kRows = 17, kCols = 100, kPadded = 112;

struct Operands {
  std::vector<float> x = std::vector<float>(kRows * kCols), scale = std::vector<float>(kRows);
  std::vector<std::int8_t> q = std::vector<std::int8_t>(kRows * kPadded);
  std::vector<std::int32_t> azp = std::vector<std::int32_t>(kRows);
  QuantizeInt8 call{.q = {q.data(), DType::kInt8, {}, {kRows, kPadded}},
                    .x = {x.data(), DType::kFloat32, {}, {kRows, kCols}},
                    .scale = {scale.data(), DType::kFloat32, {}, {kRows, 1}},
                    .azp = TensorView(azp.data(), DType::kInt32, {}, {kRows, 1})};
};

void fitting_operands_pass() {
  Operands operands;
  check(operands.call);
  operands.call.is_static = true;
  operands.call.scale.shape = {1, 1};
  operands.call.azp->shape = {1, 1};
  check(operands.call);
}

void misfits_are_named() {
  refused<Operands>([](auto& c) { c.x.dtype = DType::kInt32; }, {"epiloq.quantize_int8: x: expected float32"});
  refused<Operands>([](auto& c) { c.q.shape[1] = kCols - 1; }, {"expected x's leading dimensions and at least 100"});
  refused<Operands>([](auto& c) { c.scale.shape[0] = 1; }, {"scale: expected a value a row of x, [17]"});
  refused<Operands>([](auto& c) { c.azp->dtype = DType::kFloat32; }, {"azp: expected int32"});
  refused<Operands>([](auto& c) { c.x.strides[1] = 2; }, {"x: expected row-major memory"});
}

// On the CPU: the range of each row sets its scale, every value comes back to within a step, padding is 0.
void rows_come_back_to_within_a_step(bool symmetric) {
  auto random = test::generator();
  std::normal_distribution<float> values(0.5F, 3.0F);
  Operands operands;
  for (auto& value : operands.x) value = values(random);
  std::fill(operands.q.begin(), operands.q.end(), 99);
  if (symmetric) operands.call.azp.reset();
  quantize_int8(operands.call, nullptr);
  for (int row = 0; row < kRows; ++row) {
    float const* x = &operands.x[row * kCols];
    std::int8_t const* q = &operands.q[row * kPadded];
    auto const [low, high] = std::minmax_element(x, x + kCols);
    float const lo = std::min(*low, 0.F), hi = std::max(*high, 0.F), scale = operands.scale[row];
    CHECK_EQUAL(scale, symmetric ? std::max(-lo, hi) / 127 : (hi - lo) / 255);
    int const azp = symmetric ? 0 : operands.azp[row];
    double worst = 0;
    for (int i = 0; i < kCols; ++i) worst = std::max(worst, std::abs(double(q[i] - azp) * scale - x[i]));
    // Half a step from rounding, and in the asymmetric case half a step at the ends of the range from the zero point's.
    CHECK(worst <= (symmetric ? 0.501 : 1.001) * scale);
    CHECK(std::all_of(q + kCols, q + kPadded, [](std::int8_t value) { return value == 0; }));
  }
}

}  // namespace

int main() {
  fitting_operands_pass();
  misfits_are_named();
  rows_come_back_to_within_a_step(true);
  rows_come_back_to_within_a_step(false);
  return test::failures != 0;
}
