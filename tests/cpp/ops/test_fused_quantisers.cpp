// rms_norm_quant and silu_and_mul_quant without a GPU: the argument checks.

#include <vector>

#include "check.h"
#include "epiloq/error.h"
#include "epiloq/rms_norm_quant.h"
#include "epiloq/silu_and_mul_quant.h"

using namespace epiloq;

namespace {

constexpr int kRows = 5, kCols = 32;

struct Operands {
  std::vector<float> x = std::vector<float>(2 * kRows * kCols), more = x, weight = x, scale = x;
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
};

template <class Change>
void refused(int line, Change change, std::initializer_list<std::string> parts) {
  Operands operands;
  change(operands);
  auto const both = [&] {
    check(operands.norm);
    check(operands.gate);
  };
  test::throws<InvalidArgument>(__FILE__, line, both, parts);
}

}  // namespace

int main() {
  Operands operands;
  check(operands.norm);
  check(operands.gate);
  CHECK_THROWS(Unsupported, rms_norm_quant(operands.norm, nullptr), "epiloq.rms_norm_quant", "CUDA device");
  CHECK_THROWS(Unsupported, silu_and_mul_quant(operands.gate, nullptr), "epiloq.silu_and_mul_quant", "CUDA device");
  refused(__LINE__, [](auto& o) { o.norm.weight.shape[0] = 31; }, {"rms_norm_quant: weight: expected shape [32]"});
  refused(__LINE__, [](auto& o) { o.norm.residual_out.reset(); }, {"residual: expected it and residual_out together"});
  refused(__LINE__, [](auto& o) { o.norm.residual->shape[0] = 4; }, {"residual: expected x's shape"});
  refused(__LINE__, [](auto& o) { o.norm.residual_out = o.norm.x; }, {"residual_out: expected memory apart"});
  refused(__LINE__, [](auto& o) { o.norm.granularity = Granularity::kGroup; }, {"expected token for int8"});
  refused(__LINE__, [](auto& o) { o.gate.x.shape[1] = 31; }, {"silu_and_mul_quant: x: expected an even number"});
  refused(__LINE__, [](auto& o) { o.gate.q.shape[1] = 31; }, {"silu_and_mul_quant: out: expected x's leading"});
  return test::failures != 0;
}
