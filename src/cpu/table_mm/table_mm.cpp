// table_mm on the CPU: tokens in the order of table_mm.h, and threads that share rows of the weight.

#include "cpu/table_mm/table_mm.h"

#include <limits>
#include <vector>

#include "core/threads.h"
#include "cpu/common/columns.h"
#include "cpu/common/panels.h"
#include "cpu/common/rows.h"
#include "cpu/isa/versions.h"

namespace epiloq::ops::table_mm {
namespace {

template <int kLanes>
struct Order {
  [[gnu::always_inline]] static void run(float const* row, std::int64_t columns, float* out) {
    FewTokens<kLanes>::arrange(row, columns, out);
  }
};

}  // namespace

bool has_host_blocks(Weight const& w) { return w.block_size % kOfWord == 0 && w.k % w.block_size == 0; }

void multiply_on_host(Problem const& p, DType x, int threads) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr std::int64_t kWidestStep = kOfWord * 16;
  Weight const& w = p.weight;
  static auto const multiply = Versions<FewTokens, Rows const&, Line*>::here();
  static auto const order = Versions<Order, float const*, std::int64_t, float*>::here();
  threads = threads_for_products(p.m * w.n * w.k, threads);
  std::int64_t const stride = (w.k + kWidestStep - 1) / kWidestStep * kWidestStep;
  std::vector<float> tokens((p.m + kTokensUpTo - 1) / kTokensUpTo * kTokensUpTo * stride), row(w.k);
  for (std::int64_t m = 0; m < p.m; ++m) {
    read_row(p.x, x, m * p.stride_x, static_cast<int>(w.k), row.data());
    order(row.data(), w.k, tokens.data() + m * stride);
  }
  Columns const to{p.bias, p.out, x, p.stride_out, -kInfinity, kInfinity};
  by_panels<float>(
      p.m, w.n, kPanelRows, p.m, threads,
      [&](PanelSums<float> const& sums) {
        write(to, sums.row, sums.count, sums.column, sums.columns, sums.values, sums.stride);
      },
      [&](int first, int token, int count, float* sums) {
        std::int64_t const rows = std::min<std::int64_t>(kPanelRows, w.n - first);
        multiply({w, first, rows, tokens.data() + token * stride, stride, count}, reinterpret_cast<Line*>(sums));
      });
}

void dequantize_on_host(Weight const& w, void* out, DType dtype, int threads) {
  static auto const dequantize =
      Versions<Dequantize, std::uint8_t const*, std::int64_t, float const*, float, float*>::here();
  share(w.n, threads, [&](std::int64_t first, std::int64_t last) {
    std::vector<float> row(w.k);
    for (std::int64_t n = first; n < last; ++n) {
      for (std::int64_t k = 0; k < w.k; k += w.block_size) {
        std::int64_t const at = n * w.k + k;
        dequantize(w.codes + at / 2, w.block_size, w.table, w.scale[at / w.block_size], row.data() + k);
      }
      write_row(row.data(), static_cast<int>(w.k), dtype, out, n * w.k);
    }
  });
}

}  // namespace epiloq::ops::table_mm
