// Products of floating-point rows with FP8 weights, and rows of the weight with its scales.

#include <algorithm>
#include <bit>
#include <limits>
#include <vector>

#include "core/threads.h"
#include "cpu/common/columns.h"
#include "cpu/gemm/float8.h"
#include "cpu/gemm/float8_vectors.h"
#include "cpu/isa/versions.h"
#include "problems/fp8_weight_mm.h"

namespace epiloq::ops::fp8_weight_mm {
namespace {

template <int kLanes>
struct Widen {
  [[gnu::always_inline]] static void run(std::uint8_t const* from, std::int64_t count, float scale, float* to) {
    WidenFloat8<E4M3, kLanes>::under(from, count, scale, to);
  }
};

int shift_of(std::int64_t power_of_two) { return std::countr_zero(static_cast<std::uint64_t>(power_of_two)); }

bool is_power_of_two(std::int64_t value) { return value > 0 && std::has_single_bit(static_cast<std::uint64_t>(value)); }

}  // namespace

bool has_host_blocks(Weight const& w) {
  bool const fits_rows = w.block_rows >= w.n || is_power_of_two(w.block_rows);
  bool const fits_columns = w.block_columns % kFloat8Columns == 0 && is_power_of_two(w.block_columns / kFloat8Columns);
  return fits_rows && (w.block_columns >= w.k || fits_columns);
}

void multiply_on_host(Problem const& p, DType x, int threads) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  Weight const& w = p.weight;
  bool const all_rows = w.block_rows >= w.n, all_columns = w.block_columns >= w.k;
  ScaledFloat8 const weight{.values = w.q,
                            .rows = w.n,
                            .columns = w.k,
                            .stride = w.stride,
                            .scale = w.scale,
                            .scale_stride_row = all_rows ? 0 : w.scale_columns,
                            .scale_stride_column = all_columns ? 0 : 1,
                            .scale_shift = all_rows ? 0 : shift_of(w.block_rows),
                            .scale_shift_column = all_columns ? 0 : shift_of(w.block_columns / kFloat8Columns)};
  Columns const to{p.bias, p.out, x, p.stride_out, -kInfinity, kInfinity};
  multiply_float8(FloatRows{p.x, x, p.m, w.k, p.stride_x}, weight, threads, [&](Float8Sums const& sums) {
    write(to, sums.row, sums.count, sums.column, sums.columns, sums.values, sums.stride);
  });
}

char const* describe_on_host(Problem const& p, DType x) { return float8_routine_of_floats(p.m, x); }

void dequantize_on_host(DequantizeProblem const& problem, int threads) {
  Weight const& w = problem.weight;
  auto const widen = Versions<Widen, std::uint8_t const*, std::int64_t, float, float*>::here();
  share(problem.rows, threads, [&](std::int64_t first, std::int64_t last) {
    std::vector<float> row(w.k);
    for (std::int64_t i = first; i < last; ++i) {
      std::int64_t const n = problem.first_row + i;
      float const* const scale = w.scale + n / w.block_rows * w.scale_columns;
      for (std::int64_t k = 0; k < w.k; k += w.block_columns) {
        std::int64_t const count = std::min(w.block_columns, w.k - k);
        widen(w.q + n * w.stride + k, count, scale[k / w.block_columns], row.data() + k);
      }
      write_row(row.data(), w.k, problem.dtype, problem.out, i * w.k);
    }
  });
}

}  // namespace epiloq::ops::fp8_weight_mm
