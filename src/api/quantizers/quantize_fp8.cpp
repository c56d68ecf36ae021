#include "epiloq/quantize_fp8.h"

#include <algorithm>
#include <cmath>

#include "core/checks.h"
#include "epiloq/device.h"
#include "kernels/quantize/fp8_plan.h"

namespace epiloq {
namespace {

using ops::quantize_fp8::Problem;

constexpr std::int64_t kMaxRows = (std::int64_t{1} << 31) - 1, kMaxCols = std::int64_t{1} << 30;

struct Sizes {
  Matrix x, q;
  std::int64_t tile_rows, tile_cols;  // what shares a scale
  ScaleGrid grid;
};

// Other granularities with the same number of scales.
std::string others_that_fit(QuantizeFp8 const& call, Matrix const& x) {
  std::int64_t const g = call.group_size, count = call.scale.numel();
  struct Row {
    Granularity granularity;
    std::int64_t count;
  };
  std::string names;
  for (Row row : {Row{Granularity::kTensor, 1}, Row{Granularity::kToken, x.rows},
                  Row{Granularity::kGroup, x.rows * ceil_div(x.cols, g)},
                  Row{Granularity::kBlock, ceil_div(x.rows, g) * ceil_div(x.cols, g)}}) {
    if (row.count == count && row.granularity != call.granularity) {
      names += (names.empty() ? ", as many as granularity " : " or ") + std::string(name(row.granularity)) + " has";
    }
  }
  return names;
}

void check_scales(Checker const& check, QuantizeFp8 const& call, Sizes& sizes) {
  std::int64_t const rows = ceil_div(sizes.x.rows, sizes.tile_rows);
  std::int64_t const cols = call.granularity == Granularity::kTensor || call.granularity == Granularity::kToken
                                ? 1
                                : ceil_div(sizes.x.cols, sizes.tile_cols);
  std::int64_t const count = call.granularity == Granularity::kTensor ? 1 : rows * cols;
  check.tensor("scale", call.scale, {DType::kFloat32});
  if (call.scale.numel() != count) {
    check.fail("scale", "expected ", count, " elements for granularity ", name(call.granularity), ", got ",
               describe(call.scale), others_that_fit(call, sizes.x));
  }
  if (call.granularity == Granularity::kTensor || call.granularity == Granularity::kToken) {
    call.granularity == Granularity::kTensor ? check.scalar("scale", call.scale)
                                             : check.row_values("scale", call.scale, "x", call.x);
    sizes.grid = {count, 1, call.granularity == Granularity::kToken ? 1 : 0, 0};
  } else {
    bool const by_rows = call.granularity == Granularity::kGroup;
    std::span<std::int64_t const> const leading{call.x.shape.data(), static_cast<std::size_t>(call.x.rank - 1)};
    sizes.grid = check.scale_grid("scale", call.scale, rows, cols, by_rows ? leading : leading.first(0));
  }
}

Sizes checked(QuantizeFp8 const& call) {
  Checker const check("quantize_fp8", call.x.device);
  check.tensor("x", call.x, kFloats);
  check.tensor("out", call.q, {DType::kFloat8E4M3, DType::kFloat8E5M2});
  Matrix const x = check.rows("x", call.x);
  Sizes sizes{x, check.rows_like("out", call.q, "x", call.x, x.cols, true), 1, 1, {}};
  if (sizes.x.rows > kMaxRows || sizes.q.cols > kMaxCols) {
    check.fail("x", "expected at most 2^31 - 1 rows and 2^30 columns, got ", describe(call.x));
  }
  if (call.group_size < 1 || call.group_size > kMaxCols) {
    check.fail("group_size", "expected a positive integer, at most 2^30, got ", call.group_size);
  }
  if (call.granularity == Granularity::kBlock && call.x.rank != 2) {
    check.fail("x", "expected two dimensions for granularity block, got ", describe(call.x));
  }
  if (!(call.eps >= 0.f) || std::isinf(call.eps)) {
    check.fail("eps", "expected a finite number of at least 0, got ", call.eps);
  }
  bool const by_size = call.granularity == Granularity::kGroup || call.granularity == Granularity::kBlock;
  sizes.tile_rows = call.granularity == Granularity::kTensor  ? std::max<std::int64_t>(sizes.x.rows, 1)
                    : call.granularity == Granularity::kBlock ? call.group_size
                                                              : 1;
  sizes.tile_cols = by_size ? call.group_size : std::max<std::int64_t>(sizes.x.cols, 1);
  check_scales(check, call, sizes);
  check.apart("out", call.q, "x", call.x);
  check.apart("out", call.q, "scale", call.scale);
  if (!call.is_static) check.apart("scale", call.scale, "x", call.x);
  if (call.scale_ub) {
    check.tensor("scale_ub", *call.scale_ub, {DType::kFloat32});
    check.scalar("scale_ub", *call.scale_ub);
    check.apart("out", call.q, "scale_ub", *call.scale_ub);
    if (!call.is_static) check.apart("scale", call.scale, "scale_ub", *call.scale_ub);
  }
  return sizes;
}

Problem problem_of(QuantizeFp8 const& call, Sizes const& sizes) {
  Problem problem{};
  problem.rows = static_cast<int>(sizes.x.rows);
  problem.cols = static_cast<int>(sizes.x.cols);
  problem.padded_cols = static_cast<int>(sizes.q.cols);
  problem.tile_rows = static_cast<int>(sizes.tile_rows);
  problem.tile_cols = static_cast<int>(sizes.tile_cols);
  problem.tiles = static_cast<int>(sizes.grid.cols);
  problem.stride_x = sizes.x.stride;
  problem.stride_q = sizes.q.stride;
  problem.scale_row = sizes.grid.row_stride;
  problem.scale_col = sizes.grid.col_stride;
  problem.x = call.x.data;
  problem.q = call.q.as<std::uint8_t>();
  problem.scale = call.scale.as<float>();
  problem.rule = {call.scale_ub ? call.scale_ub->as<float>() : nullptr, call.eps, call.ue8m0};
  problem.granularity = call.granularity;
  problem.is_static = call.is_static;
  return problem;
}

bool measures_all(QuantizeFp8 const& call) { return call.granularity == Granularity::kTensor && !call.is_static; }

}  // namespace

void check(QuantizeFp8 const& call) { checked(call); }

std::string explain(QuantizeFp8 const& call) {
  Problem problem = problem_of(call, checked(call));
  if (call.x.device.type == Device::Type::kCpu) return "cpu, vectorised rows";
  problem.is_static = problem.is_static || measures_all(call);
  std::string const first = measures_all(call) ? "cuda, a pass for the scale, then " : "cuda, ";
  return first + describe(plan(problem, call.x.dtype).kernel);
}

void quantize_fp8(QuantizeFp8 const& call, Stream stream) {
  Sizes const sizes = checked(call);
  if (sizes.x.rows == 0 && !measures_all(call)) return;
  Problem problem = problem_of(call, sizes);
  // Nothing to quantise, but the scale is defined: as one row without columns.
  if (problem.rows == 0) problem.rows = 1, problem.cols = problem.padded_cols = 0;
  if (call.x.device.type == Device::Type::kCpu) {
    return ops::quantize_fp8::run_on_host(problem, call.x.dtype, call.q.dtype);
  }
  ops::quantize_fp8::launch(problem, call.x.dtype, call.q.dtype, call.x.device.index, stream);
}

#if !EPILOQ_HAS_CUDA
void ops::quantize_fp8::launch(Problem const&, DType, DType, int device, Stream) { device_properties(device); }
#endif

}  // namespace epiloq
