// Products of the CPU through the public interface: operands and scales whose products and sums float32 holds exactly.

#include <cmath>
#include <limits>
#include <vector>

#include "check.h"
#include "epiloq/error.h"
#include "epiloq/groupwise_mm.h"
#include "epiloq/scaled_bmm.h"
#include "epiloq/scaled_mm.h"

using namespace epiloq;

namespace {

constexpr DType kFloat8 = DType::kFloat8E4M3, kFloat = DType::kFloat32;
constexpr int kGroup = 128;

std::mt19937 random = test::generator();

// Bytes of float8 or int8, and the values that they are.
struct Bytes {
  std::vector<std::uint8_t> codes;
  std::vector<float> values;

  Bytes(int count, DType dtype) {
    constexpr std::uint8_t kCodes[] = {0x38, 0x40, 0xb8, 0x30, 0x00};
    constexpr float kValues[] = {1, 2, -1, .5f, 0};
    for (int i = 0; i < count; ++i) {
      auto const pick = static_cast<int>(random() % 5), value = pick - 2;
      codes.push_back(dtype == kFloat8 ? kCodes[pick] : static_cast<std::uint8_t>(value));
      values.push_back(dtype == kFloat8 ? kValues[pick] : static_cast<float>(value));
    }
  }
  void* data() { return codes.data(); }
};

std::vector<float> powers(int count) {
  std::vector<float> scales(count);
  for (auto& scale : scales) scale = std::ldexp(1.f, static_cast<int>(random() % 5) - 2);
  return scales;
}

TensorView floats(std::vector<float>& values, std::initializer_list<std::int64_t> shape) {
  return {values.data(), kFloat, {}, shape};
}

float product(float const* a, float const* b, int from, int to) {
  float sum = 0;
  for (int i = from; i < to; ++i) sum += a[i] * b[i];
  return sum;
}

void whole_rows(DType dtype, int m, int n, int k) {
  Bytes a(m * k, dtype), weight(n * k, dtype);
  std::vector<float> scale_a = powers(m), scale_b = powers(n), bias = powers(n), out(m * n, NAN);
  ScaledMm call{.out = floats(out, {m, n}),
                .a = {a.data(), dtype, {}, {m, k}},
                .b = transposed({weight.data(), dtype, {}, {n, k}}),
                .scale_a = floats(scale_a, {m}),
                .scale_b = floats(scale_b, {n}),
                .bias = floats(bias, {n})};
  call.threads = 2;
  scaled_mm(call);
  for (int i = 0; i < m * n; ++i) {
    int const row = i / n, column = i % n;
    float const sum = product(&a.values[row * k], &weight.values[column * k], 0, k);
    CHECK_EQUAL(out[i], scale_a[row] * scale_b[column] * sum + bias[column]);
  }
}

// Batches whose rows interleave; int8 by an output scale too.
void batches(DType dtype, bool int8_out) {
  constexpr int kBatches = 3, kM = 5, kN = 35, kK = 64;
  Bytes a(kBatches * kM * kK, dtype), weight(kBatches * kN * kK, dtype);
  std::vector<float> scale_a = powers(kBatches * kM), scale_b = powers(kBatches), scale_out{4.f};
  std::vector<float> out(kBatches * kM * kN, NAN);
  std::vector<std::int8_t> bytes(out.size(), 99);
  ScaledBmm call{.out = floats(out, {kBatches, kM, kN}),
                 .a = {a.data(), dtype, {}, {kBatches, kM, kK}},
                 .b = transposed({weight.data(), dtype, {}, {kBatches, kN, kK}}),
                 .scale_a = floats(scale_a, {kBatches, kM, 1}),
                 .scale_b = floats(scale_b, {kBatches, 1, 1})};
  if (int8_out) {
    call.out = {bytes.data(), DType::kInt8, {}, {kBatches, kM, kN}};
    call.scale_out = floats(scale_out, {1});
  }
  call.a.strides = {kK, kBatches * kK, 1};
  scaled_bmm(call);
  for (int i = 0; i < kBatches * kM * kN; ++i) {
    int const batch = i / (kM * kN), row = i / kN % kM, column = i % kN;
    float const sum =
        product(&a.values[(row * kBatches + batch) * kK], &weight.values[(batch * kN + column) * kK], 0, kK);
    float const expected = scale_a[batch * kM + row] * scale_b[batch] * sum;
    if (int8_out) {
      CHECK_EQUAL(static_cast<float>(bytes[i]), std::fmin(std::fmax(std::nearbyint(expected / 4.f), -128.f), 127.f));
    } else {
      CHECK_EQUAL(out[i], expected);
    }
  }
}

// Experts' rows one behind the other, or the first ones of each expert's; or one weight without experts.
struct Groups {
  static constexpr int kN = 150;
  int m, k, experts, blocks = (k + kGroup - 1) / kGroup, column_blocks = (kN + kGroup - 1) / kGroup;
  Bytes a{m * k, kFloat8}, weight{experts * kN * k, kFloat8};
  std::vector<float> scale_a = powers(m * blocks), scale_b = powers(experts * blocks * column_blocks);
  std::vector<float> out = std::vector<float>(m * kN, NAN);

  GroupwiseMm call() {
    GroupwiseMm call{.out = floats(out, {m, kN}),
                     .a = {a.data(), kFloat8, {}, {m, k}},
                     .b = transposed({weight.data(), kFloat8, {}, {experts, kN, k}}),
                     .scale_a = floats(scale_a, {m, blocks}),
                     .scale_b = floats(scale_b, {experts, blocks, column_blocks})};
    if (experts > 1) return call;
    call.b = transposed({weight.data(), kFloat8, {}, {kN, k}});
    call.scale_b = floats(scale_b, {blocks, column_blocks});
    return call;
  }
  void check_row(int row, int expert) const {
    for (int column = 0; column < kN; ++column) {
      float sum = 0;
      for (int i = 0; i < blocks; ++i) {
        float const scale = scale_b[(expert * blocks + i) * column_blocks + column / kGroup];
        sum += scale_a[row * blocks + i] * scale *
               product(&a.values[row * k], &weight.values[(expert * kN + column) * k], i * kGroup,
                       std::min(k, (i + 1) * kGroup));
      }
      CHECK_EQUAL(out[row * kN + column], sum);
    }
  }
  void check_untouched(int row) const {
    for (int column = 0; column < kN; ++column) CHECK(std::isnan(out[row * kN + column]));
  }
};

void groups() {
  for (int m : {1, 2, 40}) {
    Groups dense{.m = m, .k = 300, .experts = 1};
    groupwise_mm(dense.call());
    for (int row = 0; row < m; ++row) dense.check_row(row, 0);
  }

  Groups sorted{.m = 24, .k = 200, .experts = 3};
  std::int32_t ends[] = {3, 3, 21};
  GroupwiseMm by_offsets = sorted.call();
  by_offsets.offs = TensorView(ends, DType::kInt32, {}, {3});
  groupwise_mm(by_offsets);
  for (int row = 0; row < 21; ++row) sorted.check_row(row, row < 3 ? 0 : 2);
  for (int row = 21; row < 24; ++row) sorted.check_untouched(row);

  Groups masked{.m = 24, .k = 128, .experts = 3};
  std::int32_t counts[] = {8, 0, 5};
  GroupwiseMm by_mask = masked.call();
  by_mask.a = {masked.a.data(), kFloat8, {}, {3, 8, 128}};
  by_mask.out = floats(masked.out, {3, 8, Groups::kN});
  by_mask.scale_a = floats(masked.scale_a, {3, 8, 1});
  by_mask.masked_m = TensorView(counts, DType::kInt32, {}, {3});
  groupwise_mm(by_mask);
  for (int row = 0; row < 24; ++row) {
    row % 8 < counts[row / 8] ? masked.check_row(row, row / 8) : masked.check_untouched(row);
  }

  ends[1] = 2;
  CHECK_THROWS(InvalidArgument, groupwise_mm(by_offsets), "grouped_mm: offs: expected ascending ends", "of expert 1");
  ends[1] = 3, ends[2] = 25;
  CHECK_THROWS(InvalidArgument, groupwise_mm(by_offsets), "offs: expected ascending ends of at most 24 rows, got 25");
  counts[1] = 9;
  CHECK_THROWS(InvalidArgument, groupwise_mm(by_mask), "masked_m: expected 0 to 8 rows each, got 9 of expert 1");
}

// int8 experts with scales of whole rows, 128 columns long as a group is.
void experts_by_whole_rows() {
  constexpr int kM = 20, kN = 40, kK = 128;
  Bytes a(kM * kK, DType::kInt8), weight(2 * kN * kK, DType::kInt8);
  std::vector<float> scale_a = powers(kM), scale_b = powers(2 * kN), out(kM * kN, NAN);
  std::int32_t ends[] = {7, kM};
  GroupwiseMm call{.out = floats(out, {kM, kN}),
                   .a = {a.data(), DType::kInt8, {}, {kM, kK}},
                   .b = transposed({weight.data(), DType::kInt8, {}, {2, kN, kK}}),
                   .scale_a = floats(scale_a, {kM, 1}),
                   .scale_b = floats(scale_b, {2, 1, kN}),
                   .columns_per_scale = 1,
                   .depth_per_scale = -1,
                   .offs = TensorView(ends, DType::kInt32, {}, {2})};
  groupwise_mm(call);
  for (int i = 0; i < kM * kN; ++i) {
    int const row = i / kN, column = i % kN + (row < 7 ? 0 : kN);
    float const sum = product(&a.values[row * kK], &weight.values[column * kK], 0, kK);
    CHECK_EQUAL(out[i], scale_a[row] * scale_b[column] * sum);
  }
}

void only_the_cpu() {
  Groups groups{.m = 2, .k = 128, .experts = 1};
  GroupwiseMm call = groups.call();
  Device const gpu{Device::Type::kCuda, 0};
  for (TensorView* view : {&call.out, &call.a, &call.b, &call.scale_a, &call.scale_b}) view->device = gpu;
  CHECK_THROWS(Unsupported, groupwise_mm(call), "groupwise_mm: a: expected a tensor on the CPU");
}

}  // namespace

int main() {
  for (DType dtype : {DType::kInt8, kFloat8}) {
    for (int m : {1, 2, 17, 70}) {
      for (int k : {1, 20, 64, 576}) whole_rows(dtype, m, 45, k);
    }
  }
  batches(DType::kInt8, false);
  batches(DType::kInt8, true);
  batches(kFloat8, false);
  groups();
  experts_by_whole_rows();
  only_the_cpu();
  return test::failures != 0;
}
