// float8 on the CPU: the versions of host_float8.h, and what is shared among threads.

#include "core/host_float8.h"

#include <vector>

#include "core/checks.h"
#include "core/host_float8_pairs.h"
#include "core/host_versions.h"
#include "core/on_lines.h"
#include "core/threads.h"
#include "epiloq/error.h"
#include "epiloq/host_float8.h"

namespace epiloq {
namespace {

template <template <int kLanes> class Kernel>
using Widens = Versions<Kernel, ScaledFloat8 const&, std::int64_t, std::int64_t, float*, std::int64_t>;
template <template <int kLanes> class Kernel>
using Multiplies = Versions<Kernel, ScaledFloat8 const&, std::int64_t, std::int64_t, Float8Tokens const&>;

template <class Format>
struct Of {
  template <int kLanes>
  using Widen = WidenFloat8<Format, kLanes>;
  template <int kLanes>
  using By1 = MultiplyFloat8<Format, kLanes, 1>;
  template <int kLanes>
  using By2 = MultiplyFloat8<Format, kLanes, 2>;
  template <int kLanes>
  using By4 = MultiplyFloat8<Format, kLanes, 4>;

  static auto widen() { return Widens<Widen>::here(); }
  static auto multiply(int tokens) {
    return tokens == 1 ? Multiplies<By1>::here() : tokens == 2 ? Multiplies<By2>::here() : Multiplies<By4>::here();
  }
};

ScaledFloat8 checked(Checker const& check, HostFloat8 const& m) {
  constexpr std::int64_t kScaled = 64;  // columns of a scale are a multiple of these
  check.tensor("values", m.values, {DType::kFloat8E4M3, DType::kFloat8E5M2});
  Matrix const matrix = check.rows("values", m.values);
  ScaledFloat8 w{};
  w.values = m.values.as<std::uint8_t>(), w.is_e5m2 = m.values.dtype == DType::kFloat8E5M2;
  w.rows = matrix.rows, w.columns = matrix.cols, w.stride = matrix.stride;
  w.scale_rows = std::max<std::int64_t>(w.rows, 1), w.scale_columns = std::max<std::int64_t>(w.columns, 1);
  if (!m.scale) return w;
  TensorView const& s = *m.scale;
  check.tensor("scale", s, {DType::kFloat32});
  bool const fits = m.scale_rows > 0 && m.scale_columns > 0 && m.scale_columns % kScaled == 0 && s.rank == 2 &&
                    s.size(0) == (w.rows + m.scale_rows - 1) / m.scale_rows &&
                    s.size(1) == (w.columns + m.scale_columns - 1) / m.scale_columns;
  if (!fits) check.fail("scale", "expected one for each block of the values, got ", describe(s));
  w.scale = s.as<float>(), w.scale_rows = m.scale_rows, w.scale_columns = m.scale_columns;
  w.scale_stride_row = s.stride(0), w.scale_stride_column = s.stride(1);
  return w;
}

Matrix floats(Checker const& check, char const* name, TensorView const& view, std::int64_t rows, std::int64_t columns) {
  check.tensor(name, view, {DType::kFloat32});
  Matrix const matrix = check.rows(name, view);
  if (view.rank != 2 || matrix.rows != rows || matrix.cols != columns) {
    check.fail(name, "expected [", rows, ", ", columns, "], got ", describe(view));
  }
  return matrix;
}

void check_apart(Checker const& check, TensorView const& out, HostFloat8 const& matrix) {
  check.apart("out", out, "values", matrix.values);
  if (matrix.scale) check.apart("out", out, "scale", *matrix.scale);
}

int threads_for(std::int64_t elements, int threads) {
  constexpr std::int64_t kWorth = 1 << 15;  // waking a thread, which takes a few microseconds
  return static_cast<int>(std::clamp<std::int64_t>(elements / kWorth, 1, std::max(threads, 1)));
}

// As Float8Tokens has them.
void in_order(float const* x, std::int64_t columns, int lanes, float* out) {
  int const piece = 4 * lanes;
  for (std::int64_t i = 0; i < columns; ++i) out[i / piece * piece + i % 4 * lanes + i % piece / 4] = x[i];
}

#ifdef EPILOQ_HAS_CLONES
std::int64_t rounded_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Rows of x go through the matrix together: as many as the second cache keeps, but enough to repay what is made of it.
std::int64_t rows_at_once(std::int64_t columns, bool in_tiles) {
  std::int64_t const cached = in_tiles ? 1 << 19 : 1 << 18, least = in_tiles ? 256 : 16 * kPairBlock;  // values
  return std::max(least, cached / std::max<std::int64_t>(columns, 1) / least * least);
}

template <class FormatX, class FormatW>
void multiply_pairs(ScaledFloat8 const& x, ScaledFloat8 const& w, float* out, std::int64_t stride, int threads) {
  bool const in_tiles = x.rows >= kTileRows && has_pair_tiles();
  std::int64_t const pieces = (w.columns + kFloat8Columns - 1) / kFloat8Columns;
  std::int64_t const pairs = in_tiles ? apart_in_cache(2 * w.columns) / 4 : (w.columns + 1) / 2;
  OnLines<std::uint32_t> tokens(rounded_up(x.rows, in_tiles ? kTileRows : kPairBlock) * pairs);
  std::vector<float> scales(pieces * x.rows);
  share(x.rows, threads, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t m = first; m < last; ++m) {
      if (in_tiles) {
        ManyFloat8<FormatX>::bring_row(x, m, tokens.data() + m * pairs);
      } else {
        ManyFloat8<FormatX>::bring(x, m, tokens.data());
      }
      for (std::int64_t i = 0; i < pieces; ++i) scales[i * x.rows + m] = x.scale_at(m, i * kFloat8Columns);
    }
  });
  constexpr std::int64_t kRows = ManyFloat8<FormatW>::kLanes;
  std::int64_t const slabs = (w.rows + kRows - 1) / kRows, at_once = rows_at_once(w.columns, in_tiles);
  share(slabs * ((x.rows + at_once - 1) / at_once), threads, [&](std::int64_t begin, std::int64_t end) {
    std::vector<Line> sums(at_once);
    for (std::int64_t i = begin; i < end; ++i) {
      std::int64_t const row = i % slabs * kRows, first = i / slabs * at_once;
      int const count = static_cast<int>(std::min(at_once, x.rows - first));
      std::fill_n(sums.begin(), count, Line{});
      std::uint32_t const* const some = tokens.data() + first * pairs;
      float const* const of_some = scales.data() + first;
      if (in_tiles) {
        TokensOfTiles const rows{reinterpret_cast<std::uint16_t const*>(some), 2 * pairs, count};
        ManyFloat8<FormatW>::run_in_tiles(w, row, rows, of_some, x.rows, sums.data());
      } else {
        ManyFloat8<FormatW>::run(w, row, {some, of_some, x.rows, count}, sums.data());
      }
      for (int m = 0; m < count; ++m) {
        std::copy_n(sums[m].values, std::min(kRows, w.rows - row), out + (first + m) * stride + row);
      }
    }
  });
}
#endif

}  // namespace

bool multiplies_float8() { return has_pairs(); }

void multiply_float8(TensorView const& out, HostFloat8 const& rows, HostFloat8 const& matrix, int threads) {
  Checker const check("multiply_float8", Device{});
  ScaledFloat8 const x = checked(check, rows), w = checked(check, matrix);
  Matrix const target = floats(check, "out", out, x.rows, w.rows);
  if (x.columns != w.columns) check.fail("x", "expected ", w.columns, " columns, got ", describe(rows.values));
  for (ScaledFloat8 const& m : {x, w}) {
    if (m.scale != nullptr && m.scale_columns % kFloat8Columns != 0) {
      check.fail("scale", "expected one for each ", kFloat8Columns, " columns or a multiple, got one for ",
                 m.scale_columns);
    }
  }
  check_apart(check, out, rows);
  check_apart(check, out, matrix);
  if (!multiplies_float8()) throw Unsupported("epiloq.multiply_float8: expected a CPU with AVX-512 BF16");
#ifdef EPILOQ_HAS_CLONES
  threads = threads_for(w.rows * w.columns, threads);
  auto const multiply = x.is_e5m2 ? (w.is_e5m2 ? multiply_pairs<E5M2, E5M2> : multiply_pairs<E5M2, E4M3>)
                                  : (w.is_e5m2 ? multiply_pairs<E4M3, E5M2> : multiply_pairs<E4M3, E4M3>);
  multiply(x, w, out.as<float>(), target.stride, threads);
#endif
}

void widen_float8(TensorView const& out, HostFloat8 const& matrix, int threads) {
  Checker const check("widen_float8", Device{});
  ScaledFloat8 const w = checked(check, matrix);
  Matrix const target = floats(check, "out", out, w.rows, w.columns);
  check_apart(check, out, matrix);
  auto const rows = w.is_e5m2 ? Of<E5M2>::widen() : Of<E4M3>::widen();
  share(w.rows, threads_for(w.rows * w.columns, threads),
        [&](std::int64_t first, std::int64_t last) { rows(w, first, last, out.as<float>(), target.stride); });
}

void multiply_float8(TensorView const& out, TensorView const& x, HostFloat8 const& matrix, int threads) {
  Checker const check("multiply_float8", Device{});
  ScaledFloat8 const w = checked(check, matrix);
  int const lanes = lanes_here();
  std::int64_t const m = x.rank == 2 ? x.size(0) : 0, padded = (w.columns + 4 * lanes - 1) / (4 * lanes) * 4 * lanes;
  Matrix const source = floats(check, "x", x, m, w.columns), target = floats(check, "out", out, m, w.rows);
  check_apart(check, out, matrix);
  check.apart("out", out, "x", x);
  std::vector<float> tokens;
  for (std::int64_t first = 0; first < m; first += kFloat8Sums) {
    int const count = static_cast<int>(std::min<std::int64_t>(kFloat8Sums, m - first)), block = count == 3 ? 4 : count;
    auto const rows = w.is_e5m2 ? Of<E5M2>::multiply(block) : Of<E4M3>::multiply(block);
    tokens.assign(block * padded, 0.f);
    for (int i = 0; i < count; ++i) {
      in_order(x.as<float>() + (first + i) * source.stride, w.columns, lanes, tokens.data() + i * padded);
    }
    Float8Tokens const some{tokens.data(), padded, count, out.as<float>() + first * target.stride, target.stride};
    share(w.rows, threads_for(w.rows * w.columns, threads),
          [&](std::int64_t begin, std::int64_t end) { rows(w, begin, end, some); });
  }
}

}  // namespace epiloq
