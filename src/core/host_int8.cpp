#include "core/host_int8.h"

#include <algorithm>
#include <vector>

#include "core/checks.h"
#include "core/host_int8_slab.h"
#include "core/host_int8_tiles.h"
#include "core/host_rows.h"
#include "core/on_lines.h"
#include "core/threads.h"
#include "epiloq/host_int8.h"

namespace epiloq {
namespace {

// Tokens that go through a slab together: their sums stay in the second cache.
constexpr int kTokensAtOnce = 512;

EPILOQ_CLONES std::int32_t sum_of(std::int8_t const* values, std::int64_t count) {
  std::int32_t sum = 0;
  for (std::int64_t i = 0; i < count; ++i) sum += values[i];
  return sum;
}

struct Int8Tokens {
  OnLines<std::int32_t> copy;             // [m, stride]
  std::vector<std::int32_t> corrections;  // [m]
  std::int32_t const* x;
  std::int64_t stride;

  // Rows are read up to a multiple of `unit` bytes, where words are bytes.
  Int8Tokens(Int8Product const& p, int unit, int threads) : corrections(p.m) {
    // Where words are as in memory, nothing is copied.
    bool const as_they_lie = bytes_here().words == 1 && p.k % unit == 0 && p.stride_a % 4 == 0;
    std::int64_t const words = (std::int64_t{p.k} + unit - 1) / unit * (unit / 4) * bytes_here().words;
    stride = as_they_lie ? p.stride_a / 4 : unit == kTileBytes ? apart_in_cache(4 * words) / 4 : words;
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

int threads_for(Int8Product const& p, int threads) {
  constexpr std::int64_t kWorth = 1 << 17;  // products: a few microseconds, which it takes to wake a thread
  return static_cast<int>(std::clamp<std::int64_t>(std::int64_t{p.m} * p.n * p.k / kWorth, 1, std::max(threads, 1)));
}

struct Multiplier {
  void (*run)(Int8SlabByTokens const&, std::int32_t* sums);
  int unit;  // bytes of a token
  char const* name;
};

Multiplier multiplier_for([[maybe_unused]] std::int64_t tokens) {
#ifdef EPILOQ_HAS_CLONES
  if (tokens >= kTileRows && has_int8_tiles()) return {&MultiplyInt8InTiles::run, kTileBytes, "AMX"};
#endif
  static auto const run = ByteVersions<MultiplyInt8, Int8SlabByTokens const&, std::int32_t*>::here();
  return {run, 4, bytes_here().name};
}

}  // namespace

void multiply_int8(Int8Product const& p, int threads, std::function<void(Int8Sums const&)> const& finish) {
  Multiplier const multiplier = multiplier_for(p.m);
  threads = threads_for(p, threads);
  Int8Tokens const tokens(p, multiplier.unit, threads);
  int const rows = bytes_here().rows;
  std::int64_t const slabs = (p.n + rows - 1) / rows, chunks = (p.m + kTokensAtOnce - 1) / kTokensAtOnce;
  share(slabs * chunks, threads, [&](std::int64_t first, std::int64_t last) {
    OnLines<std::int32_t> sums(std::min(p.m, kTokensAtOnce) * rows + Int8Sums::kMostColumns - rows);
    for (std::int64_t i = first; i < last; ++i) {
      int const column = static_cast<int>(i % slabs) * rows, row = static_cast<int>(i / slabs) * kTokensAtOnce;
      int const count = std::min(kTokensAtOnce, p.m - row), columns = std::min(rows, p.n - column);
      for (int m = 0; m < count; ++m) std::fill_n(&sums[m * rows], rows, tokens.corrections[row + m]);
      multiplier.run({.weight = p.b + column * p.stride_b,
                      .stride = p.stride_b,
                      .rows = columns,
                      .k = p.k,
                      .x = tokens.x + row * tokens.stride,
                      .stride_x = tokens.stride,
                      .m = count},
                     sums.data());
      finish({.values = sums.data(), .stride = rows, .row = row, .count = count, .column = column, .columns = columns});
    }
  });
}

std::string describe_int8(std::int64_t tokens) {
  return std::string("cpu, int8 products with ") + multiplier_for(tokens).name;
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
