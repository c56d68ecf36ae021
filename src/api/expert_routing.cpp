#include "epiloq/expert_routing.h"

#include <limits>

#include "api/checks/quantized_rows.h"
#include "core/checks.h"
#include "epiloq/device.h"
#include "problems/experts/expert_routing.h"

namespace epiloq {
namespace {

using ops::expert_routing::CombineProblem;
using ops::expert_routing::GatherProblem;
using ops::expert_routing::SelectProblem;
using ops::expert_routing::SortProblem;

constexpr std::int64_t kMostRows = std::numeric_limits<int>::max(), kMostColumns = std::int64_t{1} << 22;

// The argument that gives T and top_k: contiguous [T, top_k].
void expect_pairs(Checker const& check, char const* argument, TensorView const& view) {
  if (view.rank != 2) check.fail(argument, "expected [T, top_k], got ", describe(view));
  check.contiguous(argument, view);
  if (view.numel() > kMostRows) check.fail(argument, "expected at most ", kMostRows, " rows, got ", describe(view));
}

SelectProblem checked(SelectExperts const& call) {
  Checker const check("select_experts", call.logits.device);
  check.tensor("logits", call.logits, kFloats);
  check.tensor("weights", call.weights, {DType::kFloat32, call.logits.dtype});
  check.tensor("experts", call.experts, {DType::kInt64});
  if (call.logits.rank != 2) check.fail("logits", "expected [T, E], got ", describe(call.logits));
  Matrix const logits = check.rows("logits", call.logits);
  expect_pairs(check, "weights", call.weights);
  std::int64_t const top_k = call.weights.shape[1];
  check.shape("weights", call.weights, {logits.rows, top_k});
  check.shape("experts", call.experts, {logits.rows, top_k});
  if (logits.cols < 1 || logits.cols > kMostExperts)
    check.fail("logits", "expected 1 to ", kMostExperts, " experts, got ", describe(call.logits));
  if (top_k < 1 || top_k > std::min<std::int64_t>(kMostExpertsPerToken, logits.cols)) {
    check.fail("top_k", "expected 1 to ", std::min<std::int64_t>(kMostExpertsPerToken, logits.cols), ", got ", top_k);
  }
  if (call.bias) {
    check.tensor("bias", *call.bias, {DType::kFloat32});
    check.vector("bias", *call.bias, logits.cols);
  }
  constexpr int kMostGroups = 32;  // a lane has the score of one
  if (call.groups < 1 || call.groups > kMostGroups || logits.cols % call.groups != 0) {
    check.fail("groups", "expected a divisor of the ", logits.cols, " experts, at most ", kMostGroups, ", got ",
               call.groups);
  }
  std::int64_t const size = logits.cols / call.groups;
  if (call.top_groups < 1 || call.top_groups > call.groups || call.top_groups * size < top_k) {
    check.fail("top_groups", "expected at most ", call.groups, " with at least ", top_k, " experts, got ",
               call.top_groups);
  }
  if (call.group_scores < 1 || call.group_scores > std::min<std::int64_t>(2, size))
    check.fail("group_scores", "expected 1 or 2, at most a group's ", size, " experts, got ", call.group_scores);
  check.apart("weights", call.weights, "logits", call.logits);
  check.apart("experts", call.experts, "logits", call.logits);
  check.apart("experts", call.experts, "weights", call.weights);
  return {call.logits.data,
          call.bias ? call.bias->as<float>() : nullptr,
          call.weights.data,
          call.experts.as<std::int64_t>(),
          logits.stride,
          static_cast<int>(logits.rows),
          static_cast<int>(logits.cols),
          static_cast<int>(top_k),
          call.score,
          call.normalize,
          call.epsilon,
          call.factor,
          call.groups,
          call.top_groups,
          call.group_scores};
}

// `call` gives experts, tokens, places and ends.
template <class Call>
SortProblem checked_sort(Checker const& check, Call const& call, TensorView const* order) {
  check.tensor("experts", call.experts, {DType::kInt64});
  expect_pairs(check, "experts", call.experts);
  std::int64_t const rows = call.experts.numel(), experts = call.ends.numel();
  if (rows > kMostSortedRows)
    check.fail("experts", "expected at most ", kMostSortedRows, " rows, got ", describe(call.experts));
  auto const written = [&](char const* name, TensorView const& view) {
    check.tensor(name, view, {DType::kInt64});
    check.vector(name, view, rows);
    check.apart(name, view, "experts", call.experts);
    return view.as<std::int64_t>();
  };
  SortProblem problem{};
  problem.expert_of_row = call.experts.template as<std::int64_t>();
  if (order != nullptr) problem.order = written("order", *order);
  problem.tokens = written("tokens", call.tokens);
  problem.places = written("places", call.places);
  check.tensor("ends", call.ends, {DType::kInt32});
  check.vector("ends", call.ends, experts);
  if (experts < 1 || experts > kMostExperts)
    check.fail("ends", "expected 1 to ", kMostExperts, " experts, got ", describe(call.ends));
  problem.ends = call.ends.template as<std::int32_t>();
  problem.rows = static_cast<int>(rows);
  problem.experts = static_cast<int>(experts);
  problem.top_k = static_cast<int>(std::max<std::int64_t>(call.experts.shape[1], 1));
  return problem;
}

SortProblem checked(SortExpertRows const& call) {
  return checked_sort(Checker("sort_expert_rows", call.experts.device), call, &call.order);
}

GatherProblem checked(GatherExpertRows const& call) {
  Checker const check("gather_expert_rows", call.x.device);
  check.tensor("x", call.x, {DType::kFloat16, DType::kBFloat16});
  if (call.x.rank != 2) check.fail("x", "expected [T, H], got ", describe(call.x));
  Matrix const x = check.rows("x", call.x);
  if (x.cols < 8 || x.cols % 8 != 0 || x.cols > kMostGatheredColumns) {
    check.fail("x", "expected a multiple of 8 columns, at most ", kMostGatheredColumns, ", got ", describe(call.x));
  }
  GatherProblem problem{};
  problem.sort = checked_sort(check, call, nullptr);
  if (call.experts.shape[0] != x.rows) {
    check.fail("experts", "expected a row for each of x's ", x.rows, ", got ", describe(call.experts));
  }
  problem.x = call.x.data;
  problem.stride_x = x.stride;
  problem.in_vectors = in_vectors(call.x.data, call.x.dtype, x.stride, x.cols);
  // As many rows as are gathered, all of them x's first.
  TensorView repeated = call.x;
  repeated.shape[0] = problem.sort.rows;
  repeated.strides[0] = 0;
  check.apart("rows", call.rows, "x", call.x);
  check.apart("rows", call.rows, "experts", call.experts);
  if (call.rows.dtype == call.x.dtype) {
    Matrix const rows = check.rows_like("rows", call.rows, "experts", repeated, x.cols);
    problem.out.cols = problem.out.padded_cols = static_cast<int>(rows.cols);
    problem.out.stride_q = rows.stride;
    problem.out.q = call.rows.as<std::uint8_t>();
    if (!in_vectors(call.rows.data, call.rows.dtype, rows.stride, rows.cols))
      check.fail("rows", "expected rows on 16 bytes, got ", describe(call.rows));
    return problem;
  }
  problem.out =
      check_quantized(check, call.rows, call.scale, repeated, x.cols, call.granularity, call.group_size, false);
  check.apart("scale", call.scale, "experts", call.experts);
  if (problem.out.padded_cols % 8 != 0 || !is_aligned(call.rows.data) || problem.out.stride_q % 16 != 0)
    check.fail("rows", "expected rows on 16 bytes, got ", describe(call.rows));
  if (call.granularity == Granularity::kGroup) {
    int const size = call.group_size;
    if (size < 32 || size > 256 || (size & (size - 1)) != 0)
      check.fail("group_size", "expected a power of two from 32 to 256, got ", size);
    problem.out.lanes = size / 8;
  }
  return problem;
}

CombineProblem checked(CombineExpertRows const& call) {
  Checker const check("combine_expert_rows", call.rows.device);
  check.tensor("rows", call.rows, kFloats);
  if (call.rows.rank != 2) check.fail("rows", "expected [N, H], got ", describe(call.rows));
  Matrix const rows = check.rows("rows", call.rows);
  check.tensor("weights", call.weights, {DType::kFloat32, call.rows.dtype});
  expect_pairs(check, "weights", call.weights);
  check.tensor("places", call.places, {DType::kInt64});
  check.vector("places", call.places, call.weights.numel());
  if (rows.rows != call.weights.numel()) {
    check.fail("rows", "expected ", call.weights.numel(), " rows, one for each of weights, got ", describe(call.rows));
  }
  if (rows.cols > kMostColumns)
    check.fail("rows", "expected at most ", kMostColumns, " columns, got ", describe(call.rows));
  check.tensor("out", call.out, {call.rows.dtype});
  check.shape("out", call.out, {call.weights.shape[0], rows.cols});
  check.apart("out", call.out, "rows", call.rows);
  if (call.count) {
    check.tensor("count", *call.count, {DType::kInt32});
    check.scalar("count", *call.count);
  }
  return {call.rows.data,
          call.places.as<std::int64_t>(),
          call.weights.data,
          call.count ? call.count->as<std::int32_t>() : nullptr,
          call.out.data,
          rows.stride,
          static_cast<int>(call.weights.shape[0]),
          static_cast<int>(call.weights.shape[1]),
          static_cast<int>(rows.cols)};
}

}  // namespace

void check(SelectExperts const& call) { checked(call); }
void check(SortExpertRows const& call) { checked(call); }
void check(GatherExpertRows const& call) { checked(call); }
void check(CombineExpertRows const& call) { checked(call); }

void select_experts(SelectExperts const& call, Stream stream) {
  SelectProblem const problem = checked(call);
  expect_device("select_experts", "logits", call.logits, Device::Type::kCuda);
  if (problem.tokens == 0) return;
  launch_select(problem, call.logits.dtype, call.weights.dtype, call.logits.device.index, stream);
}

void sort_expert_rows(SortExpertRows const& call, Stream stream) {
  SortProblem const problem = checked(call);
  expect_device("sort_expert_rows", "experts", call.experts, Device::Type::kCuda);
  launch_sort(problem, call.experts.device.index, stream);
}

void gather_expert_rows(GatherExpertRows const& call, Stream stream) {
  GatherProblem const problem = checked(call);
  expect_device("gather_expert_rows", "x", call.x, Device::Type::kCuda);
  launch_gather(problem, call.x.dtype, call.rows.dtype, call.x.device.index, stream);
}

void combine_expert_rows(CombineExpertRows const& call, Stream stream) {
  CombineProblem const problem = checked(call);
  expect_device("combine_expert_rows", "rows", call.rows, Device::Type::kCuda);
  if (problem.tokens == 0 || problem.width == 0) return;
  bool const whole = in_vectors(problem.rows, call.rows.dtype, problem.stride_rows, problem.width) &&
                     in_vectors(problem.out, call.out.dtype, problem.width, problem.width);
  launch_combine(problem, whole, call.rows.dtype, call.weights.dtype, call.rows.device.index, stream);
}

#if !EPILOQ_HAS_CUDA
namespace ops::expert_routing {
void launch_select(SelectProblem const&, DType, DType, int device, Stream) { device_properties(device); }
void launch_sort(SortProblem const&, int device, Stream) { device_properties(device); }
void launch_gather(GatherProblem const&, DType, DType, int device, Stream) { device_properties(device); }
void launch_combine(CombineProblem const&, bool, DType, DType, int device, Stream) { device_properties(device); }
}  // namespace ops::expert_routing
#endif

}  // namespace epiloq
