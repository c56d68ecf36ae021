// rms_norm_quant and silu_and_mul_quant on the CPU, and both without a quantiser: values, and the argument checks.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "core/float8.h"
#include "epiloq/error.h"
#include "epiloq/rms_norm.h"
#include "epiloq/rms_norm_quant.h"
#include "epiloq/silu_and_mul.h"
#include "epiloq/silu_and_mul_quant.h"

using namespace epiloq;

namespace {

constexpr int kRows = 5, kCols = 32;

struct Operands {
  std::vector<float> x = std::vector<float>(2 * kRows * kCols), more = x, weight = x, scale = x, y = x;
  std::vector<std::int8_t> q = std::vector<std::int8_t>(kRows * kCols);
  TensorView row{x.data(), DType::kFloat32, {}, {kRows, kCols}},
      residual{more.data(), DType::kFloat32, {}, {kRows, kCols}};
  RmsNormQuant norm{.q = {q.data(), DType::kInt8, {}, {kRows, kCols}},
                    .x = row,
                    .weight = {weight.data(), DType::kFloat32, {}, {kCols}},
                    .scale = {scale.data(), DType::kFloat32, {}, {kRows, 1}},
                    .residual = residual,
                    .residual_out = residual};
  SiluAndMulQuant gate{.q = norm.q, .x = {x.data(), DType::kFloat32, {}, {kRows, 2 * kCols}}, .scale = norm.scale};
  TensorView out{y.data(), DType::kFloat32, {}, {kRows, kCols}};
  RmsNorm plain_norm{.out = out, .x = row, .weight = norm.weight, .residual = residual, .residual_out = residual};
  SiluAndMul plain_gate{.out = out, .x = gate.x};
};

template <class Change>
void refused(int line, Change change, std::initializer_list<std::string> parts) {
  Operands operands;
  change(operands);
  auto const both = [&] {
    check(operands.norm);
    check(operands.gate);
    check(operands.plain_norm);
    check(operands.plain_gate);
  };
  test::throws<InvalidArgument>(__FILE__, line, both, parts);
}

// Whether a row of q is what float64 gives, within the documented bounds.
bool is_quantised(std::vector<double> const& values, std::int8_t const* q, float scale) {
  double largest = 0;
  for (double const value : values) largest = std::max(largest, std::fabs(value));
  bool right = std::fabs(scale * 127. / largest - 1) <= 0x1p-20;
  for (int i = 0; i < kCols; ++i) {
    double const exact = values[i] / scale;
    right = right && std::fabs(q[i] - exact) <= 0.5 + std::fabs(exact) * 0x1p-19;
  }
  return right;
}

// Whether a row of y is float64's, rounded to float32 after what the documentation allows before that.
bool is_rounded(std::vector<double> const& values, float const* y) {
  bool right = true;
  for (int i = 0; i < kCols; ++i)
    right = right && std::fabs(y[i] - values[i]) <= std::fabs(values[i]) * (0x1p-24 + 0x1p-19);
  return right;
}

void rows_are_those_of_float64(int threads) {
  Operands o;
  std::mt19937 random(threads);
  std::normal_distribution<float> normal;
  for (auto* values : {&o.x, &o.more, &o.weight})
    std::generate(values->begin(), values->end(), [&] { return normal(random); });
  auto const x = o.x, more = o.more;
  o.norm.threads = o.gate.threads = o.plain_norm.threads = o.plain_gate.threads = threads;
  silu_and_mul_quant(o.gate);
  silu_and_mul(o.plain_gate);
  for (int row = 0; row < kRows; ++row) {
    std::vector<double> gated(kCols);
    for (int i = 0; i < kCols; ++i) {
      double const gate = x[row * 2 * kCols + i];
      gated[i] = gate / (1 + std::exp(-gate)) * x[row * 2 * kCols + kCols + i];
    }
    CHECK(is_quantised(gated, &o.q[row * kCols], o.scale[row]));
    CHECK(is_rounded(gated, &o.y[row * kCols]));
  }
  rms_norm(o.plain_norm);  // updates the residual in place
  auto const sum = o.more;
  o.more = more;
  rms_norm_quant(o.norm);
  CHECK(sum == o.more);
  for (int row = 0; row < kRows; ++row) {
    std::vector<double> normed(kCols);
    double squares = 0;
    for (int i = 0; i < kCols; ++i) {
      float const sum = x[row * kCols + i] + more[row * kCols + i];
      CHECK_EQUAL(o.more[row * kCols + i], sum);
      normed[i] = sum;
      squares += normed[i] * normed[i];
    }
    for (int i = 0; i < kCols; ++i) normed[i] *= o.weight[i] / std::sqrt(squares / kCols + double{o.norm.eps});
    CHECK(is_quantised(normed, &o.q[row * kCols], o.scale[row]));
    CHECK(is_rounded(normed, &o.y[row * kCols]));
  }
}

void gates_far_from_zero() {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  Operands o;
  for (float const gate : {-1e15f, -200.f, -88.5f, -88.f, -87.f, -20.f, 0.f, 20.f, 88.f, 200.f, 1e15f}) {
    for (int i = 0; i < kCols; ++i) o.x[i] = gate, o.x[kCols + i] = 0x1p60f;
    silu_and_mul_quant(o.gate);
    double const exact = gate / (1 + std::exp(-double{gate})) * 0x1p60 / 127;
    CHECK(std::fabs(o.scale[0] - std::max(std::fabs(exact), double{kSmallestScale})) <= std::fabs(exact) * 0x1p-20);
  }
  for (float const gate : {-kInfinity, kInfinity - kInfinity}) {
    o.x[3] = gate;
    silu_and_mul_quant(o.gate);
    CHECK(std::isnan(o.scale[0]));
  }
}

// GPT-OSS's gate, of rows in halves and interleaved, and the default's bits with limits that nothing exceeds.
void other_gates() {
  constexpr float kAlpha = 1.702f, kLimit = 7.f;
  Operands o;
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0.f, 4.f);
  std::generate(o.x.begin(), o.x.end(), [&] { return normal(random); });
  o.x[kCols] = -0.f;
  silu_and_mul(o.plain_gate);
  auto const plain = o.y;
  CHECK(std::signbit(plain[0]) != std::signbit(o.x[0]));
  o.plain_gate.gate.limit = 1e9f;
  silu_and_mul(o.plain_gate);
  CHECK(std::memcmp(o.y.data(), plain.data(), kRows * kCols * sizeof(float)) == 0);
  o.plain_gate.gate = o.gate.gate = {.alpha = kAlpha, .limit = kLimit, .offset = 1.f};
  silu_and_mul(o.plain_gate);
  silu_and_mul_quant(o.gate);
  for (int row = 0; row < kRows; ++row) {
    float const* const x = &o.x[row * 2 * kCols];
    std::vector<double> gated(kCols);
    for (int i = 0; i < kCols; ++i) {
      double const gate = std::min(x[i], kLimit), factor = std::clamp(x[kCols + i], -kLimit, kLimit) + 1.;
      gated[i] = gate / (1 + std::exp(-kAlpha * gate)) * factor;
    }
    CHECK(is_quantised(gated, &o.q[row * kCols], o.scale[row]));
    CHECK(is_rounded(gated, &o.y[row * kCols]));
  }
  auto const halves = o.y, x = o.x;
  for (int row = 0; row < kRows; ++row)
    for (int i = 0; i < 2 * kCols; ++i) o.x[row * 2 * kCols + i] = x[row * 2 * kCols + i % 2 * kCols + i / 2];
  o.plain_gate.interleaved = true;
  silu_and_mul(o.plain_gate);
  CHECK(std::memcmp(o.y.data(), halves.data(), kRows * kCols * sizeof(float)) == 0);
}

}  // namespace

int main() {
  Operands operands;
  check(operands.norm);
  check(operands.gate);
  check(operands.plain_norm);
  check(operands.plain_gate);
  for (int const threads : {1, 3}) rows_are_those_of_float64(threads);
  gates_far_from_zero();
  other_gates();
  refused(__LINE__, [](auto& o) { o.norm.weight.shape[0] = 31; }, {"rms_norm_quant: weight: expected shape [32]"});
  refused(__LINE__, [](auto& o) { o.norm.residual_out.reset(); }, {"residual: expected it and residual_out together"});
  refused(__LINE__, [](auto& o) { o.norm.residual->shape[0] = 4; }, {"residual: expected x's shape"});
  refused(__LINE__, [](auto& o) { o.norm.residual_out = o.norm.x; }, {"residual_out: expected memory apart"});
  refused(__LINE__, [](auto& o) { o.norm.granularity = Granularity::kGroup; }, {"expected token for int8"});
  refused(__LINE__, [](auto& o) { o.gate.x.shape[1] = 31; }, {"silu_and_mul_quant: x: expected an even number"});
  refused(__LINE__, [](auto& o) { o.gate.q.shape[1] = 31; }, {"silu_and_mul_quant: out: expected x's leading"});
  refused(__LINE__, [](auto& o) { o.plain_norm.eps = -1; }, {"rms_norm: eps: expected a finite number"});
  refused(__LINE__, [](auto& o) { o.plain_norm.out = o.row; }, {"rms_norm: out: expected memory apart from x's"});
  refused(__LINE__, [](auto& o) { o.plain_norm.weight.dtype = DType::kFloat16; }, {"weight: expected float32"});
  refused(__LINE__, [](auto& o) { o.plain_gate.x.shape[1] = 31; }, {"silu_and_mul: x: expected an even number"});
  refused(__LINE__, [](auto& o) { o.plain_gate.out.shape[1] = 31; }, {"silu_and_mul: out: expected x's leading"});
  refused(__LINE__, [](auto& o) { o.plain_gate.gate.alpha = 0; }, {"silu_and_mul: alpha: expected a positive finite"});
  refused(__LINE__, [](auto& o) { o.plain_gate.gate.limit = 0; }, {"silu_and_mul: limit: expected a positive number"});
  refused(__LINE__, [](auto& o) { o.gate.gate.limit = -1; }, {"silu_and_mul_quant: limit: expected a positive number"});
  refused(__LINE__, [](auto& o) { o.gate.gate.offset = INFINITY; }, {"offset: expected a finite number, got inf"});
  return test::failures != 0;
}
