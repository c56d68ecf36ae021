// Rows of an FP8 weight with its scales, for products in floating point.

#include <algorithm>
#include <vector>

#include "core/threads.h"
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

}  // namespace

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
