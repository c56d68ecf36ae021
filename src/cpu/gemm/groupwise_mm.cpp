#include "cpu/gemm/groupwise_mm.h"

#include <limits>
#include <vector>

#include "cpu/common/columns.h"
#include "cpu/gemm/float8.h"
#include "cpu/gemm/scaled_mm.h"

namespace epiloq::ops::groupwise_mm {
namespace {

using gemm::GroupScales;
using gemm::GroupwiseProblem;

ScaledFloat8 matrix(void const* values, std::int64_t rows, std::int64_t k, std::int64_t stride,
                    GroupScales const& scales) {
  return {.values = static_cast<std::uint8_t const*>(values),
          .rows = rows,
          .columns = k,
          .stride = stride,
          .scale = scales.ptr,
          .scale_stride_row = scales.stride_row,
          .scale_stride_column = scales.stride_k,
          .scale_shift = scales.shift};
}

// One product with scales per group.
void multiply_groups(GroupwiseProblem const& p, DType out, int threads) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  Columns const to{p.bias, p.d, out, p.stride_d, -kInfinity, kInfinity};
  multiply_float8(matrix(p.a, p.m, p.k, p.stride_a, p.scale_a), matrix(p.b, p.n, p.k, p.stride_b, p.scale_b), threads,
                  [&](Float8Sums const& sums) {
                    write(to, sums.row, sums.count, sums.column, sums.columns, sums.values, sums.stride);
                  });
}

std::vector<float> dense(GroupScales const& scales, int count) {
  std::vector<float> values(count);
  for (int i = 0; i < count; ++i) values[i] = scales.ptr[std::int64_t{i} * scales.stride_row];
  return values;
}

// Or with scales per row.
void multiply_rows(GroupwiseProblem const& p, gemm::Types types, int threads) {
  std::vector<float> const scale_a = dense(p.scale_a, p.m), scale_b = dense(p.scale_b, p.n);
  gemm::Problem const product{.m = p.m,
                              .n = p.n,
                              .k = p.k,
                              .stride_a = p.stride_a,
                              .stride_b = p.stride_b,
                              .stride_d = p.stride_d,
                              .a = p.a,
                              .b = p.b,
                              .d = p.d,
                              .operands = {.scale_a = scale_a.data(),
                                           .scale_b = scale_b.data(),
                                           .bias = p.bias,
                                           .scale_a_is_vector = true,
                                           .scale_b_is_vector = true}};
  scaled_mm::run_on_host(product, types, threads);
}

// The rows from `first` on of an expert.
GroupwiseProblem of_expert(GroupwiseProblem const& p, DType out, int expert, std::int64_t first, int rows) {
  GroupwiseProblem one = p;
  one.m = rows, one.experts = 1, one.offs = one.masked_m = nullptr;
  one.a = static_cast<char const*>(p.a) + first * p.stride_a;
  one.b = static_cast<char const*>(p.b) + std::int64_t{expert} * p.n * p.stride_b;
  one.d = static_cast<char*>(p.d) + first * p.stride_d * size_of(out);
  one.scale_a.ptr += first * p.scale_a.stride_row;
  one.scale_b.ptr += std::int64_t{expert} * p.scale_b_expert;
  return one;
}

}  // namespace

void run_on_host(GroupwiseProblem const& p, gemm::Types types, bool per_row_scales, int threads) {
  auto const multiply = [&](GroupwiseProblem const& one) {
    if (one.m == 0) return;
    per_row_scales ? multiply_rows(one, types, threads) : multiply_groups(one, types.out, threads);
  };
  if (p.offs == nullptr && p.masked_m == nullptr) return multiply(p);
  for (int e = 0; e < p.experts; ++e) {
    std::int64_t const begin = p.masked_m != nullptr ? std::int64_t{e} * p.m : e == 0 ? 0 : p.offs[e - 1];
    multiply(of_expert(p, types.out, e, begin, p.masked_m != nullptr ? p.masked_m[e] : p.offs[e] - begin));
  }
}

}  // namespace epiloq::ops::groupwise_mm
