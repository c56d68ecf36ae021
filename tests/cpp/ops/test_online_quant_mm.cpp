// quantize_blockwise_int8 and online_quant_mm without a GPU: the argument checks, the CPU's blocks, the choices.

#include <algorithm>
#include <cmath>
#include <vector>

#include "check.h"
#include "epiloq/error.h"
#include "epiloq/online_quant_mm.h"
#include "epiloq/quantize_blockwise_int8.h"

using namespace epiloq;
using test::refused;

namespace {

constexpr int kM = 5, kN = 18, kK = 100, kGroup = 32, kBlocks = 4;

void blocks_come_back_to_within_half_a_step() {
  auto random = test::generator();
  std::normal_distribution<float> values(0.5F, 3.0F);
  std::vector<float> x(kM * kK), scale(kM * kBlocks), offset(kM * kBlocks);
  std::vector<std::int8_t> q(kM * kK);
  std::vector<std::int32_t> sum(kM * kBlocks);
  for (auto& value : x) value = values(random);
  quantize_blockwise_int8({.q = {q.data(), DType::kInt8, {}, {kM, kK}},
                           .x = {x.data(), DType::kFloat32, {}, {kM, kK}},
                           .scale = {scale.data(), DType::kFloat32, {}, {kM, kBlocks}},
                           .offset = TensorView(offset.data(), DType::kFloat32, {}, {kM, kBlocks}),
                           .sum = {sum.data(), DType::kInt32, {}, {kM, kBlocks}},
                           .group_size = kGroup},
                          nullptr);
  for (int row = 0; row < kM; ++row) {
    std::vector<std::int32_t> sums(kBlocks);
    for (int i = 0; i < kK; ++i) {
      int const block = row * kBlocks + i / kGroup;
      sums[i / kGroup] += q[row * kK + i];
      CHECK(std::abs(scale[block] * double(q[row * kK + i]) + offset[block] - x[row * kK + i]) <= 0.501 * scale[block]);
    }
    CHECK(std::equal(sums.begin(), sums.end(), sum.begin() + row * kBlocks));
  }
}

// Kp = 128 and, as 32 divides 128, four blocks; N = 18 is padded to 20.
struct Operands {
  std::vector<float> x = std::vector<float>(kM * kK), out = std::vector<float>(kM * kN);
  alignas(16) float parameters[4 * 2 * 20] = {};
  alignas(16) std::int8_t values[kN * 128] = {};
  OnlineQuantMm call{.out = {out.data(), DType::kFloat32, {}, {kM, kN}},
                     .x = {x.data(), DType::kFloat32, {}, {kM, kK}},
                     .values = {values, DType::kInt8, {}, {kN, 128}},
                     .parameters = {parameters, DType::kFloat32, {}, {4, 2, 20}},
                     .in_features = kK,
                     .group_size = kGroup};
};

// Without Python: weights of scale * q about 0, whose blocks' sums say so.
void a_product_on_the_cpu() {
  auto random = test::generator();
  std::normal_distribution<float> values(0.5F, 3.0F);
  Operands o;
  for (auto& value : o.x) value = values(random);
  std::vector<double> exact(kM * kN);
  for (int n = 0; n < kN; ++n) {
    for (int k = 0; k < kK; ++k) {
      int const block = k / kGroup, q = static_cast<int>(random() % 256) - 128;
      o.values[n * 128 + k] = static_cast<std::int8_t>(q);
      o.parameters[block * 2 * 20 + n] = 0.01F;
      o.parameters[(block * 2 + 1) * 20 + n] += 0.01F * static_cast<float>(q);
      for (int m = 0; m < kM; ++m) exact[m * kN + n] += 0.01 * q * o.x[m * kK + k];
    }
  }
  std::fill(o.out.begin(), o.out.end(), NAN);
  online_quant_mm(o.call);
  double error = 0, size = 0;
  for (int i = 0; i < kM * kN; ++i) error += std::pow(o.out[i] - exact[i], 2), size += exact[i] * exact[i];
  CHECK(error < 0.02 * 0.02 * size);  // of 8-bit activations
  CHECK(explain(o.call).starts_with("cpu"));
  o.call.x.device = o.call.out.device = o.call.values.device = o.call.parameters.device = {Device::Type::kCuda, 0};
  CHECK_THROWS(Unsupported, online_quant_mm(o.call), "x: expected a tensor on the CPU");
}

void misfits_are_named() {
  Operands const fitting;
  check(fitting.call);
  refused<Operands>([](auto& c) { c.in_features = 99; }, {"epiloq.online_quant_mm: x: expected […, 99]"});
  refused<Operands>([](auto& c) { c.bits = 4; }, {"w_q: expected [18, 64], got int8"});
  refused<Operands>([](auto& c) { c.bits = 5; }, {"bits: expected 4 or 8"});
  refused<Operands>([](auto& c) { c.group_size = 64; }, {"w_scale: expected [2, 2, 20], got float32"});
  refused<Operands>([](auto& c) { c.parameters.shape[2] = 18; }, {"w_scale: expected [4, 2, 20], got float32"});
  refused<Operands>([](auto& c) { c.out.dtype = DType::kFloat16; }, {"out: expected float32"});
  refused<Operands>([](auto& c) { c.out.data = c.x.data; }, {"out: expected memory apart from x"});
  refused<Operands>([](auto& c) { c.lo = 2, c.hi = 1; }, {"clamp: expected lo <= hi"});
}

void choices_are_functions_of_numbers() {
  CHECK(explain_online_quant_mm({1, 4096, 4096, 128, 4}, Arch::kSm80, 108).starts_with("sm80 mma.sync w4a8"));
  CHECK(explain_online_quant_mm({1024, 4096, 4096, 128, 8}, Arch::kSm90, 132).starts_with("sm90 wgmma w8a8"));
  CHECK(explain_online_quant_mm({1024, 4096, 4096, 64, 8}, Arch::kSm90, 132).starts_with("sm80 mma.sync w8a8"));
  CHECK(explain_online_quant_mm({1, 4096, 4096, 128, 4}, Arch::kSm75, 40).starts_with("sm75 mma.sync w4a8"));
  CHECK(explain_online_quant_mm({64, 64, 64, 48, 8}, Arch::kSm75, 40).starts_with("staged"));
  CHECK(needs_staging(48) && !needs_staging(32));
  CHECK_THROWS(InvalidArgument, explain_online_quant_mm({1, 1, 1, 128, 8}, Arch::kAuto, 0), "arch");
}

}  // namespace

int main() {
  blocks_come_back_to_within_half_a_step();
  a_product_on_the_cpu();
  misfits_are_named();
  choices_are_functions_of_numbers();
  return test::failures != 0;
}
