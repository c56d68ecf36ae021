// The CPU's kernels for indices into a table, for registers of every width, whatever this machine's are.

#include <cmath>
#include <vector>

#include "check.h"
#include "cpu/table_mm/table_mm.h"

using namespace epiloq;
using namespace epiloq::ops::table_mm;

namespace {

struct Operands {
  Weight weight;
  int tokens;
  std::vector<std::uint8_t> codes;
  std::vector<float> table, scale, x;

  Operands(std::int64_t n, std::int64_t k, std::int64_t block_size, int tokens_)
      : tokens(tokens_), codes(n * k / 2), table(16), scale(n * k / block_size), x(tokens * k) {
    auto random = test::generator();
    auto const fill = [&](std::vector<float>& values) {
      for (float& value : values) value = static_cast<float>(random() % 2000) / 1000.F - 1.F;
    };
    for (auto& byte : codes) byte = static_cast<std::uint8_t>(random());
    fill(table), fill(scale), fill(x);
    weight = {n, k, block_size, codes.data(), table.data(), scale.data()};
  }

  float number(std::int64_t row, std::int64_t column) const {
    std::int64_t const i = row * weight.k + column;
    return table[codes[i / 2] >> (i % 2 == 0 ? 4 : 0) & 15] * scale[i / weight.block_size];
  }
};

template <int kLanes>
void few_tokens() {
  for (auto const [k, block_size] : {std::pair{64, 64}, {192, 64}, {520, 8}, {256, 256}, {72, 24}}) {
    for (int tokens = 1; tokens <= 8; ++tokens) {
      for (int rows : {1, 5, 16}) {
        Operands const o(20, k, block_size, tokens);
        constexpr int kStep = FewTokens<kLanes>::kStep;
        std::int64_t const stride = (k + kStep - 1) / kStep * kStep;
        std::vector<float> x((tokens + kTokens) * stride);
        for (int m = 0; m < tokens; ++m) FewTokens<kLanes>::arrange(&o.x[m * k], k, &x[m * stride]);
        std::vector<Line> sums(tokens + kTokens);
        FewTokens<kLanes>::run({o.weight, 3, rows, x.data(), stride, tokens}, sums.data());
        for (int m = 0; m < tokens; ++m) {
          for (int row = 0; row < rows; ++row) {
            double exact = 0, size = 0;
            for (int column = 0; column < k; ++column) {
              double const product = static_cast<double>(o.number(3 + row, column)) * o.x[m * k + column];
              exact += product, size += std::abs(product);
            }
            CHECK(std::abs(sums[m].values[row] - exact) <= 2e-6 * size);
          }
        }
      }
    }
  }
}

template <int kLanes>
void rows_as_numbers() {
  for (int count : {8, 16, 24, 64, 128}) {
    Operands const o(1, count, count, 0);
    std::vector<float> row(count);
    Dequantize<kLanes>::run(o.codes.data(), count, o.table.data(), o.scale[0], row.data());
    for (int i = 0; i < count; ++i) CHECK_EQUAL(row[i], o.number(0, i));
  }
}

}  // namespace

int main() {
  few_tokens<4>(), few_tokens<8>(), few_tokens<16>();
  rows_as_numbers<4>(), rows_as_numbers<8>(), rows_as_numbers<16>();
  return test::failures != 0;
}
