// scaled_mm on the CPU: the epilogues of the kernels, after exact sums.

#include "ops/scaled_mm/host.h"

#include <algorithm>

#include "core/host_int8.h"
#include "core/host_rows.h"
#include "epilogue/eval.h"

namespace epiloq::ops::scaled_mm {
namespace {

constexpr int kMostColumns = Int8Sums::kMostColumns;

// One row of a slab of D, of operands that are a column's each or the row's.
template <class Epilogue>
[[gnu::always_inline]] inline void evaluate(epilogue::Operands const& operands, std::int32_t const* sums, float* out) {
  auto const expr = Epilogue::template make<float>(operands);
  for (int i = 0; i < kMostColumns; ++i) out[i] = epilogue::eval(expr, sums[i], 0, i);
}
EPILOQ_CLONES void evaluate_scaled(epilogue::Operands const& o, std::int32_t const* sums, float* out) {
  evaluate<epilogue::Scaled>(o, sums, out);
}
EPILOQ_CLONES void evaluate_azp(epilogue::Operands const& o, std::int32_t const* sums, float* out) {
  evaluate<epilogue::ScaledAzp>(o, sums, out);
}

// The epilogue of a slab's columns.
class Finish {
 public:
  Finish(gemm::Problem const& problem, DType dtype, bool has_zero_point, int column, int columns)
      : p_(problem), dtype_(dtype), has_zero_point_(has_zero_point), column_(column), columns_(columns) {
    epilogue::Operands const& o = p_.operands;
    for (int i = 0; i < columns; ++i) scale_b_[i] = o.scale_b[o.scale_b_is_vector ? column + i : 0];
    if (o.bias != nullptr) read_row(o.bias, dtype, column, columns, bias_);
    if (o.azp_adj != nullptr) std::copy_n(o.azp_adj + column, columns, azp_adj_);
  }

  void row(std::int64_t m, std::int32_t const* sums) const {
    epilogue::Operands const& o = p_.operands;
    epilogue::Operands row{.scale_a = o.scale_a + (o.scale_a_is_vector ? m : 0),
                           .scale_b = scale_b_,
                           .bias = o.bias == nullptr ? nullptr : bias_,
                           .azp = o.azp == nullptr ? nullptr : o.azp + (o.azp_is_vector ? m : 0),
                           .azp_adj = azp_adj_,
                           .scale_b_is_vector = true};
    float out[kMostColumns];
    (has_zero_point_ ? evaluate_azp : evaluate_scaled)(row, sums, out);
    write_row(out, columns_, dtype_, p_.d, m * p_.stride_d + column_);
  }

 private:
  gemm::Problem const& p_;
  DType dtype_;
  bool has_zero_point_;
  int column_, columns_;
  float scale_b_[kMostColumns] = {}, bias_[kMostColumns] = {};
  std::int32_t azp_adj_[kMostColumns] = {};
};

}  // namespace

void run_on_host(gemm::Problem const& p, DType out, bool has_zero_point, int threads) {
  Int8Product const product{
      p.m,        p.n,       p.k, static_cast<std::int8_t const*>(p.a), static_cast<std::int8_t const*>(p.b),
      p.stride_a, p.stride_b};
  multiply_int8(product, threads, [&](Int8Sums const& sums) {
    Finish const finish(p, out, has_zero_point, sums.column, sums.columns);
    for (int m = 0; m < sums.count; ++m) finish.row(sums.row + m, sums.values + m * sums.stride);
  });
}

}  // namespace epiloq::ops::scaled_mm
