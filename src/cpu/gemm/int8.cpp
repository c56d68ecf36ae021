#include "cpu/gemm/int8.h"

#include <algorithm>
#include <vector>

#include "core/checks.h"
#include "core/threads.h"
#include "cpu/common/rows.h"
#include "cpu/gemm/int8_amx.h"
#include "cpu/gemm/int8_panel.h"
#include "epiloq/host_int8.h"

namespace epiloq {
namespace {

// Tokens multiplied by a panel at a time: their sums stay in L2.
constexpr int kTokensAtOnce = 512;
constexpr int kFewestInTiles = 3;

EPILOQ_CLONES std::int32_t sum_of(std::int8_t const* values, std::int64_t count) {
  std::int32_t sum = 0;
  for (std::int64_t i = 0; i < count; ++i) sum += values[i];
  return sum;
}

struct Int8Tokens {
  std::vector<std::int32_t> copy, corrections;  // [m, stride], [m]
  std::int32_t const* x;
  std::int64_t stride;

  Int8Tokens(Int8Product const& p, int threads) : corrections(p.m) {
    // If words are in memory order, nothing is copied.
    bool const as_they_lie = bytes_here().words == 1 && p.k % 4 == 0 && p.stride_a % 4 == 0;
    stride = as_they_lie ? p.stride_a / 4 : (std::int64_t{p.k} + 3) / 4 * bytes_here().words;
    if (!as_they_lie) copy.resize(p.m * stride);
    x = as_they_lie ? reinterpret_cast<std::int32_t const*>(p.a) : copy.data();
    share(p.m, threads, [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t m = first; m < last; ++m) {
        corrections[m] = -128 * sum_of(p.a + m * p.stride_a, p.k);
        if (!as_they_lie) bytes_here().in_words(p.a + m * p.stride_a, p.k, copy.data() + m * stride);
      }
    });
  }
};

void multiply_panels(Int8Product const& p, int threads, FinishPanel<std::int32_t> const& finish) {
  static auto const multiply = ByteVersions<MultiplyInt8, Int8PanelByTokens const&, std::int32_t*>::here();
  Int8Tokens const tokens(p, threads);
  int const rows = bytes_here().rows;
  by_panels(p.m, p.n, rows, kTokensAtOnce, threads, finish, [&](int row, int first, int count, std::int32_t* sums) {
    for (int m = 0; m < count; ++m) std::fill_n(sums + m * rows, rows, tokens.corrections[first + m]);
    multiply({.weight = p.b + row * p.stride_b,
              .stride = p.stride_b,
              .rows = std::min(rows, p.n - row),
              .k = p.k,
              .x = tokens.x + first * tokens.stride,
              .stride_x = tokens.stride,
              .m = count},
             sums);
  });
}

bool uses_tiles([[maybe_unused]] std::int64_t tokens) {
#ifdef EPILOQ_HAS_CLONES
  return tokens >= kFewestInTiles && has_int8_tiles();
#else
  return false;
#endif
}

#ifdef EPILOQ_HAS_CLONES
void multiply_tiles(Int8Product const& p, int threads, FinishPanel<std::int32_t> const& finish) {
  TokenTiles const tiles{Int8InTiles::lines(p.k), p.m};
  std::vector<Line> tokens(tiles.size());
  share(tiles.count(), threads, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i) Int8InTiles::arrange(p, tiles, static_cast<int>(i), tokens.data());
  });
  by_panels(p.m, p.n, Int8InTiles::kRows, kTokensAtOnce, threads, finish,
            [&](int row, int first, int count, std::int32_t* sums) {
              Int8InTiles::run(p, row, tokens.data(), tiles, first / TokenTiles::kTokens, count,
                               reinterpret_cast<Line*>(sums));
            });
}
#else
void multiply_tiles(Int8Product const&, int, FinishPanel<std::int32_t> const&) {}
#endif

}  // namespace

void multiply_int8(Int8Product const& p, int threads, FinishPanel<std::int32_t> const& finish) {
  if (p.m == 0 || p.n == 0) return;
  threads = threads_for_products(std::int64_t{p.m} * p.n * p.k, threads);
  (uses_tiles(p.m) ? multiply_tiles : multiply_panels)(p, threads, finish);
}

std::string describe_int8(std::int64_t tokens) {
  return std::string("cpu, int8 products with ") + (uses_tiles(tokens) ? "AMX" : bytes_here().name);
}

void multiply_int8(TensorView const& out, TensorView const& a, TensorView const& b, int threads) {
  Checker const check("multiply_int8", Device{});
  check.tensor("a", a, {DType::kInt8});
  check.tensor("b", b, {DType::kInt8});
  check.tensor("out", out, {DType::kInt32});
  Matrix const left = check.rows("a", a), right = check.rows("b", b), to = check.rows("out", out);
  bool const fits = a.rank == 2 && b.rank == 2 && out.rank == 2 && left.cols == right.cols && to.rows == left.rows &&
                    to.cols == right.rows;
  if (!fits) check.fail("out", "expected [M, N] of a [M, K] and b [N, K], got ", describe(out));
  check.apart("out", out, "a", a);
  check.apart("out", out, "b", b);
  auto* const values = out.as<std::int32_t>();
  multiply_int8({static_cast<int>(left.rows), static_cast<int>(right.rows), static_cast<int>(left.cols),
                 a.as<std::int8_t>(), b.as<std::int8_t>(), left.stride, right.stride},
                threads, [&](Int8Sums const& sums) {
                  for (int m = 0; m < sums.count; ++m) {
                    std::copy_n(sums.values + m * sums.stride, sums.columns,
                                values + (sums.row + m) * to.stride + sums.column);
                  }
                });
}

}  // namespace epiloq
