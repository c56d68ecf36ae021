// scaled_mm on the CPU: the epilogues of the kernels, after exact sums.

#include "ops/scaled_mm/host.h"

#include <algorithm>

#include "core/host_float8.h"
#include "core/host_int8.h"
#include "core/host_rows.h"
#include "core/threads.h"
#include "epilogue/eval.h"

namespace epiloq::ops::scaled_mm {
namespace {

constexpr int kMostColumns = Int8Sums::kMostColumns, kTogether = Int8Sums::kTogether;

// Some columns of one row of D, of operands that are a column's each or the row's.
template <class Epilogue, class Sum, class Out>
[[gnu::always_inline]] inline void evaluate(epilogue::Operands const& operands, Sum const* sums, int columns,
                                            Out* out) {
  auto const expr = Epilogue::template make<Out>(operands);
  for (int first = 0; first < columns; first += kTogether) {
    for (int i = first; i < first + kTogether; ++i) out[i] = epilogue::eval(expr, sums[i], 0, i);
  }
}
EPILOQ_CLONES void evaluate_float8(epilogue::Operands const& o, float const* sums, int columns, float* out) {
  evaluate<epilogue::Scaled>(o, sums, columns, out);
}
EPILOQ_CLONES void evaluate_scaled(epilogue::Operands const& o, std::int32_t const* sums, int columns, float* out) {
  evaluate<epilogue::Scaled>(o, sums, columns, out);
}
EPILOQ_CLONES void evaluate_azp(epilogue::Operands const& o, std::int32_t const* sums, int columns, float* out) {
  evaluate<epilogue::ScaledAzp>(o, sums, columns, out);
}
EPILOQ_CLONES void evaluate_requantized(epilogue::Operands const& o, std::int32_t const* sums, int columns,
                                        std::int8_t* out) {
  evaluate<epilogue::Requantized>(o, sums, columns, out);
}

// The epilogue of a slab's columns.
class Finish {
 public:
  Finish(gemm::Problem const& problem, DType dtype, int column, int columns)
      : p_(problem), dtype_(dtype), column_(column), columns_(columns) {
    epilogue::Operands const& o = p_.operands;
    for (int i = 0; i < columns; ++i) scale_b_[i] = o.scale_b[o.scale_b_is_vector ? column + i : 0];
    if (o.bias != nullptr) read_row(o.bias, dtype, column, columns, bias_);
    if (o.azp_adj != nullptr) std::copy_n(o.azp_adj + column, columns, azp_adj_);
  }

  template <class Sum, class Out>
  void rows(SlabSums<Sum> const& sums, void (*evaluate)(epilogue::Operands const&, Sum const*, int, Out*)) const {
    for (int i = 0; i < sums.count; ++i) {
      std::int64_t const m = sums.row + i;
      epilogue::Operands const& o = p_.operands;
      epilogue::Operands row{.scale_a = o.scale_a + (o.scale_a_is_vector ? m : 0),
                             .scale_b = scale_b_,
                             .bias = o.bias == nullptr ? nullptr : bias_,
                             .azp = o.azp == nullptr ? nullptr : o.azp + (o.azp_is_vector ? m : 0),
                             .azp_adj = azp_adj_,
                             .scale_b_is_vector = true,
                             .scale_out = o.scale_out};
      Out out[kMostColumns];
      evaluate(row, sums.values + i * sums.stride, columns_, out);
      store(out, m * p_.stride_d + column_);
    }
  }

 private:
  void store(float const* row, std::int64_t offset) const { write_row(row, columns_, dtype_, p_.d, offset); }
  void store(std::int8_t const* row, std::int64_t offset) const {
    std::copy_n(row, columns_, static_cast<std::int8_t*>(p_.d) + offset);
  }

  gemm::Problem const& p_;
  DType dtype_;
  int column_, columns_;
  float scale_b_[kMostColumns] = {}, bias_[kMostColumns] = {};
  std::int32_t azp_adj_[kMostColumns] = {};
};

// An operand [rows, k].
ScaledFloat8 matrix(void const* values, DType dtype, std::int64_t rows, std::int64_t k, std::int64_t stride) {
  return {static_cast<std::uint8_t const*>(values), rows, k, stride, dtype == DType::kFloat8E5M2};
}

void multiply(gemm::Problem const& p, gemm::Types types, bool has_zero_point, int threads) {
  auto const finish = [&](auto const& sums) { return Finish(p, types.out, sums.column, sums.columns); };
  if (types.is_float8()) {
    multiply_float8(matrix(p.a, types.a, p.m, p.k, p.stride_a), matrix(p.b, types.b, p.n, p.k, p.stride_b), threads,
                    [&](Float8Sums const& sums) { finish(sums).rows(sums, evaluate_float8); });
    return;
  }
  Int8Product const product{
      p.m,        p.n,       p.k, static_cast<std::int8_t const*>(p.a), static_cast<std::int8_t const*>(p.b),
      p.stride_a, p.stride_b};
  multiply_int8(product, threads, [&](Int8Sums const& sums) {
    if (types.out == DType::kInt8) {
      finish(sums).rows(sums, evaluate_requantized);
    } else {
      finish(sums).rows(sums, has_zero_point ? evaluate_azp : evaluate_scaled);
    }
  });
}

gemm::Problem of_batch(gemm::Problem const& p, DType out, std::int64_t batch) {
  gemm::Problem one = p;
  one.a = static_cast<char const*>(p.a) + batch * p.batch_a;
  one.b = static_cast<char const*>(p.b) + batch * p.batch_b;
  one.d = static_cast<char*>(p.d) + batch * p.batch_d * size_of(out);
  one.operands = p.operands.of_batch(batch);
  return one;
}

}  // namespace

void run_on_host(gemm::Problem const& p, gemm::Types types, bool has_zero_point, int threads) {
  threads = threads_for_products(std::int64_t{p.batches} * p.m * p.n * p.k, threads);
  bool const by_batches = p.batches >= threads;  // each by one thread
  share(p.batches, by_batches ? threads : 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i) {
      multiply(of_batch(p, types.out, i), types, has_zero_point, by_batches ? 1 : threads);
    }
  });
}

}  // namespace epiloq::ops::scaled_mm
