// scaled_bmm without a GPU: the argument checks, and the epilogues of a batch and of an int8 output, as hand-written
// kernels evaluate them.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "check.h"
#include "epilogue/eval.h"
#include "epilogue/library.h"
#include "epiloq/error.h"
#include "epiloq/scaled_bmm.h"

using namespace epiloq;
using test::refused;

namespace {

constexpr int kB = 3, kM = 17, kN = 40, kK = 64;

struct Operands {
  std::vector<std::int8_t> a = std::vector<std::int8_t>(kB * kM * kK);
  std::vector<std::int8_t> weight = std::vector<std::int8_t>(kB * kN * kK);
  std::vector<std::uint16_t> out = std::vector<std::uint16_t>(kB * kM * kN);
  std::vector<float> scale_a = std::vector<float>(kB * kM), scale_b = std::vector<float>(kB);
  ScaledBmm call{.out = {out.data(), DType::kFloat16, {}, {kB, kM, kN}},
                 .a = {a.data(), DType::kInt8, {}, {kB, kM, kK}},
                 .b = transposed({weight.data(), DType::kInt8, {}, {kB, kN, kK}}),
                 .scale_a = {scale_a.data(), DType::kFloat32, {}, {kB, kM, 1}},
                 .scale_b = {scale_b.data(), DType::kFloat32, {}, {kB, 1, 1}}};
};

void fitting_operands_pass() {
  Operands operands;
  check(operands.call);
  operands.call.b.strides[0] = 0;              // one matrix for all
  operands.call.a.strides = {kK, kB * kK, 1};  // heads that interleave
  operands.call.out.strides = {kN, kB * kN, 1};
  check(operands.call);
}

void misfits_are_named() {
  float one = 1;
  refused<Operands>([](auto& c) { c.a.rank = 2; }, {"epiloq.scaled_bmm: a: expected 3 dimensions"});
  refused<Operands>([](auto& c) { c.b.shape[0] = 2; }, {"b: expected [3, 64, N]"});
  refused<Operands>([](auto& c) { c.b.strides[1] = 2; }, {"b: expected stride 1 along K"});
  refused<Operands>([](auto& c) { c.out.strides[0] = kN; }, {"out: expected batches that do not overlap"});
  refused<Operands>([](auto& c) { c.out.strides[0] = 0; }, {"out: expected batches that do not overlap"});
  refused<Operands>([](auto& c) { c.a.strides[0] = -kK; }, {"a: expected rows that do not overlap"});
  refused<Operands>([](auto& c) { c.scale_b.shape[1] = 2; }, {"scale_b: expected one element, [B, 1, 1] or [B, 1, N]"});
  refused<Operands>([&](auto& c) { c.scale_out = TensorView(&one, DType::kFloat32, {}, {1}); },
                    {"out: expected int8, got float16"});
}

// round(sa (sb acc) / so) of the given product of a batch.
int requantized(float scaled, float scale_out, int batch = 0) {
  float const scale_a[] = {scaled, 2 * scaled}, scale_b = 1;
  epilogue::Operands operands;
  operands.scale_a = scale_a;
  operands.scale_b = &scale_b;
  operands.scale_out = &scale_out;
  operands.scale_a_batch = 1;
  auto const expr = epilogue::Requantized::make<std::int8_t>(operands.of_batch(batch));
  return epilogue::eval(expr, std::int32_t{1}, 0, 0);
}

void int8_outputs_round_to_even_and_saturate() {
  for (int i = -400; i <= 400; ++i) {
    float const value = static_cast<float>(i) / 2;
    int const nearest = static_cast<int>(std::nearbyint(value));
    CHECK_EQUAL(requantized(value, 1), std::min(std::max(nearest, -128), 127));
    CHECK_EQUAL(requantized(value, 2, 1), std::min(std::max(nearest, -128), 127));
  }
  float const infinity = std::numeric_limits<float>::infinity();
  CHECK_EQUAL(requantized(infinity, 1), 127);
  CHECK_EQUAL(requantized(-infinity, 1), -128);
  CHECK_EQUAL(requantized(std::nanf(""), 1), 0);
}

}  // namespace

int main() {
  fitting_operands_pass();
  misfits_are_named();
  int8_outputs_round_to_even_and_saturate();
  return test::failures;
}
