// scaled_mm without a GPU: the argument checks, the choice of kernels, and the epilogues against double precision.

#include <cmath>
#include <vector>

#include "check.h"
#include "epiloq/error.h"
#include "epiloq/scaled_mm.h"

using namespace epiloq;
using test::refused;

namespace {

constexpr int kM = 17, kN = 100, kK = 576;

// Operands that fit each other; `call` views them.
struct Operands {
  std::vector<std::int8_t> a = std::vector<std::int8_t>(kM * kK);
  std::vector<std::int8_t> weight = std::vector<std::int8_t>(kN * kK);
  std::vector<std::uint16_t> out = std::vector<std::uint16_t>(kM * kN);
  std::vector<float> scale_a = std::vector<float>(kM), scale_b = std::vector<float>(kN);
  std::vector<std::int32_t> azp = std::vector<std::int32_t>(kM), azp_adj = std::vector<std::int32_t>(kN);
  ScaledMm call{.out = {out.data(), DType::kFloat16, {}, {kM, kN}},
                .a = {a.data(), DType::kInt8, {}, {kM, kK}},
                .b = transposed({weight.data(), DType::kInt8, {}, {kN, kK}}),
                .scale_a = {scale_a.data(), DType::kFloat32, {}, {kM, 1}},
                .scale_b = {scale_b.data(), DType::kFloat32, {}, {kN}}};
};

void fitting_operands_pass() {
  Operands operands;
  check(operands.call);
  operands.call.azp_adj = TensorView(operands.azp_adj.data(), DType::kInt32, {}, {kN});
  operands.call.azp = TensorView(operands.azp.data(), DType::kInt32, {}, {kM});
  check(operands.call);
}

void misfits_are_named() {
  float one = 1;
  Device const gpu{Device::Type::kCuda, 0};
  refused<Operands>([](auto& c) { c.a.dtype = DType::kFloat32; },
                    {"epiloq.scaled_mm: a: expected int8", "float32 [17, 576]"});
  refused<Operands>([&](auto& c) { c.b.device = gpu; }, {"b: expected a tensor on the CPU", "on cuda:0"});
  refused<Operands>([](auto& c) { c.b = transposed(c.b); }, {"b: expected [576, N]", "int8 [100, 576]"});
  refused<Operands>([](auto& c) { c.b.strides = {kN, 1}; }, {"b: expected column-major", "weight.t()"});
  refused<Operands>([](auto& c) { c.out.shape[1] = kN - 1; }, {"out: expected a's leading dimensions and 100 columns"});
  refused<Operands>([](auto& c) { c.scale_a.shape[0] = 3; }, {"scale_a: expected a value a row of a, [17]"});
  refused<Operands>([](auto& c) { c.scale_b.shape[0] = 3; }, {"scale_b: expected one element, [100]"});
  refused<Operands>([&](auto& c) { c.bias = TensorView(&one, DType::kFloat32, {}, {1}); }, {"bias: expected float16"});
  refused<Operands>([&](auto& c) { c.azp = c.scale_a; }, {"epiloq.scaled_mm_azp: azp_adj: expected the column sums"});
  refused<Operands>([](auto& c) { c.a.data = c.a.template as<char>() + 1; }, {"a: expected a pointer aligned to 16"});
  refused<Operands>([](auto& c) { c.out.data = c.a.data; }, {"out: expected memory apart from a's"});
}

void every_problem_has_a_kernel() {
  for (Arch arch : {Arch::kSm75, Arch::kSm80, Arch::kSm90}) {
    for (std::int64_t m : {1, 17, 64, 100, 4095}) {
      for (bool aligned : {true, false}) {
        std::string const text = explain_scaled_mm({m, 576, 4096, aligned}, arch, 0);
        CHECK(!text.empty());
        CHECK(!aligned || text.find("sm") == 0);
      }
    }
  }
}

// One epilogue over all of acc, against the formula in double precision: an error of a few float roundings at most.
void epilogues_follow_their_formula(bool with_bias, bool with_zero_point) {
  auto random = test::generator();
  std::uniform_int_distribution<std::int32_t> sums(-2'000'000, 2'000'000), zero_points(-128, 127), columns(-5000, 5000);
  std::uniform_real_distribution<float> scales(1e-4F, 1e-1F), biases(-10, 10);
  std::vector<std::int32_t> acc(kM * kN);
  std::vector<float> out(kM * kN), bias(kN);
  Operands operands;
  for (auto& value : acc) value = sums(random);
  for (auto& value : bias) value = biases(random);
  for (auto& value : operands.scale_a) value = scales(random);
  for (auto& value : operands.scale_b) value = scales(random);
  for (auto& value : operands.azp) value = zero_points(random);
  for (auto& value : operands.azp_adj) value = columns(random);
  operands.call.out = {out.data(), DType::kFloat32, {}, {kM, kN}};
  if (with_bias) operands.call.bias = TensorView(bias.data(), DType::kFloat32, {}, {kN});
  if (with_zero_point) {
    operands.call.azp_adj = TensorView(operands.azp_adj.data(), DType::kInt32, {}, {kN});
    operands.call.azp = TensorView(operands.azp.data(), DType::kInt32, {}, {kM});
  }
  evaluate_epilogue({acc.data(), DType::kInt32, {}, {kM, kN}}, operands.call);
  double worst = 0;
  for (int m = 0; m < kM; ++m) {
    for (int n = 0; n < kN; ++n) {
      double const zero = with_zero_point ? double(operands.azp[m]) * operands.azp_adj[n] : 0;
      double const product = double(operands.scale_a[m]) * operands.scale_b[n] * (acc[m * kN + n] - zero);
      double const added = with_bias ? bias[n] : 0;
      worst = std::max(worst, std::abs(out[m * kN + n] - (product + added)) / (std::abs(product) + std::abs(added)));
    }
  }
  // The accumulator's conversion, two products and a sum round, each by 2^-24 at most.
  CHECK(worst <= 4 * std::ldexp(1, -24));
}

// Bit for bit what the kernels' expression gives of exact sums, whatever is given.
void products_on_the_cpu(bool with_bias, bool with_zero_point) {
  auto random = test::generator();
  std::vector<std::int32_t> acc(kM * kN);
  std::vector<float> out(kM * kN, NAN), expected(kM * kN), bias(kN);
  Operands o;
  for (auto& value : o.a) value = static_cast<std::int8_t>(random());
  for (auto& value : o.weight) value = static_cast<std::int8_t>(random());
  std::uniform_real_distribution<float> scales(1e-4F, 1e-1F);
  for (auto* values : {&o.scale_a, &o.scale_b, &bias}) {
    for (auto& value : *values) value = scales(random);
  }
  for (auto& value : o.azp) value = static_cast<int>(random() % 256) - 128;
  for (int n = 0; n < kN; ++n) {
    for (int k = 0; k < kK; ++k) o.azp_adj[n] += o.weight[n * kK + k];
    for (int m = 0; m < kM; ++m) {
      for (int k = 0; k < kK; ++k) acc[m * kN + n] += o.a[m * kK + k] * o.weight[n * kK + k];
    }
  }
  o.call.out = {out.data(), DType::kFloat32, {}, {kM, kN}};
  if (with_bias) o.call.bias = TensorView(bias.data(), DType::kFloat32, {}, {kN});
  if (with_zero_point) {
    o.call.azp_adj = TensorView(o.azp_adj.data(), DType::kInt32, {}, {kN});
    o.call.azp = TensorView(o.azp.data(), DType::kInt32, {}, {kM});
  }
  scaled_mm(o.call);
  CHECK(explain(o.call).starts_with("cpu, int8 products"));
  o.call.out.data = expected.data();
  evaluate_epilogue({acc.data(), DType::kInt32, {}, {kM, kN}}, o.call);
  CHECK(out == expected);
  o.call.a.device = o.call.b.device = o.call.out.device = {Device::Type::kCuda, 0};
  o.call.scale_a.device = o.call.scale_b.device = {Device::Type::kCuda, 0};
  o.call.bias.reset(), o.call.azp_adj.reset(), o.call.azp.reset();
  CHECK_THROWS(Unsupported, scaled_mm(o.call), "a: expected a tensor on the CPU");
}

}  // namespace

int main() {
  fitting_operands_pass();
  misfits_are_named();
  every_problem_has_a_kernel();
  for (bool with_bias : {false, true}) {
    for (bool with_zero_point : {false, true}) {
      epilogues_follow_their_formula(with_bias, with_zero_point);
      products_on_the_cpu(with_bias, with_zero_point);
    }
  }
  return test::failures != 0;
}
