#include "api/checks/quantized_rows.h"

#include <algorithm>
#include <bit>

namespace epiloq {
namespace {

constexpr int kVector = 8, kMaxThreads = 1024;

void check_granularity(Checker const& check, TensorView const& q, Granularity granularity, int group_size, bool ue8m0) {
  bool const is_int8 = q.dtype == DType::kInt8;
  if (granularity != Granularity::kToken && (is_int8 || granularity != Granularity::kGroup)) {
    check.fail("granularity", "expected token", is_int8 ? "" : " or group", " for ", name(q.dtype), ", got ",
               name(granularity));
  }
  if (ue8m0 && is_int8) check.fail("ue8m0", "expected false for int8, got true");
  if (group_size < 1) check.fail("group_size", "expected a positive integer, got ", group_size);
}

}  // namespace

Matrix check_rows(Checker const& check, TensorView const& out, TensorView const& x, std::int64_t cols,
                  bool may_be_padded) {
  constexpr std::int64_t kMaxRows = (std::int64_t{1} << 31) - 1, kMaxCols = std::int64_t{1} << 30;
  Matrix const rows = check.rows_like("out", out, "x", x, cols, may_be_padded);
  if (rows.rows > kMaxRows || rows.cols > kMaxCols) {
    check.fail("x", "expected at most 2^31 - 1 rows and 2^30 columns, got ", describe(x));
  }
  return rows;
}

QuantizedRows check_quantized(Checker const& check, TensorView const& q, TensorView const& scale, TensorView const& x,
                              std::int64_t cols, Granularity granularity, int group_size, bool ue8m0) {
  check.tensor("out", q, {DType::kInt8, DType::kFloat8E4M3});
  Matrix const matrix = check_rows(check, q, x, cols, true);
  check_granularity(check, q, granularity, group_size, ue8m0);
  check.tensor("scale", scale, {DType::kFloat32});
  QuantizedRows rows{};
  rows.rows = static_cast<int>(matrix.rows);
  rows.cols = static_cast<int>(cols);
  rows.padded_cols = static_cast<int>(matrix.cols);
  rows.stride_q = matrix.stride;
  rows.q = q.as<std::uint8_t>();
  rows.scale = scale.as<float>();
  rows.rule.power_of_two = ue8m0;
  if (granularity == Granularity::kToken) {
    check.row_values("scale", scale, "x", x);
    rows.tile_cols = std::max(rows.cols, 1);
    rows.tiles = 1;
    rows.scale_row = 1;
  } else {
    std::span<std::int64_t const> const leading{x.shape.data(), static_cast<std::size_t>(x.rank - 1)};
    ScaleGrid const grid = check.scale_grid("scale", scale, matrix.rows, ceil_div(cols, group_size), leading);
    rows.tile_cols = group_size;
    rows.tiles = static_cast<int>(grid.cols);
    rows.scale_row = grid.row_stride;
    rows.scale_col = grid.col_stride;
  }
  check.apart("out", q, "x", x);
  check.apart("out", q, "scale", scale);
  check.apart("scale", scale, "x", x);
  return rows;
}

RowPlan plan_rows(QuantizedRows const& rows, bool inputs_in_vectors, int sm_count, int kernels) {
  constexpr int kVectors[] = {1, 2, 4};
  auto const whole_warps = [](int threads) { return std::clamp((threads + 31) / 32 * 32, 32, kMaxThreads); };
  bool const whole = inputs_in_vectors && rows.padded_cols % kVector == 0 && rows.stride_q % kVector == 0 &&
                     is_aligned(rows.q, kVector);
  bool const by_row = rows.tile_cols >= rows.cols;
  unsigned const lanes = by_row ? 0 : rows.tile_cols / kVector;
  bool const in_warp =
      by_row || (rows.tile_cols % kVector == 0 && std::has_single_bit(lanes) && lanes >= kFewestLanes && lanes <= 32);
  int const vectors = rows.cols / kVector;
  if (!whole || !in_warp || vectors > kVectors[kernels - 1] * kMaxThreads) return {0, whole_warps(rows.cols), 0};
  // Few rows get many threads each, for latency; many rows small CTAs, several per SM. Rows of one warp share a CTA, as
  // starting one takes time.
  constexpr int kWarp = 32, kRowsOfBlock = 4;
  int const comfortable = rows.rows <= 2 * sm_count ? kMaxThreads : rows.rows <= 16 * sm_count ? 128 : kWarp;
  int kernel = 1;
  while (kernel < kernels && vectors > kVectors[kernel - 1] * comfortable) ++kernel;
  int const threads = whole_warps(static_cast<int>(ceil_div(vectors, kVectors[kernel - 1])));
  return {kernel, threads, static_cast<int>(lanes), threads == kWarp && comfortable < kMaxThreads ? kRowsOfBlock : 1};
}

char const* describe(RowPlan const& plan) {
  return plan.kernel == 0 ? "cuda, element by element, several passes" : "cuda, the row in registers, one pass";
}

bool in_vectors(void const* data, DType dtype, std::int64_t stride, std::int64_t cols) {
  return cols % kVector == 0 && stride * size_of(dtype) % 16 == 0 && is_aligned(data);
}

}  // namespace epiloq
