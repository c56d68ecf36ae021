#include "epiloq/weight_only_mm.h"

#include <algorithm>

#include "core/checks.h"
#include "ops/weight_only_mm/kernels.h"
#include "ops/weight_only_mm/launch.h"
#include "ops/weight_only_mm/layout.h"
#include "ops/weight_only_mm/select.h"

namespace epiloq {
namespace {

namespace wo = ops::weight_only_mm;

constexpr std::int64_t kMaxSize = (std::int64_t{1} << 31) - 1 - wo::kPadding;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Of a group of 2^n times 128 columns, n; of the whole row, one that no step reaches.
int group_shift(std::int64_t group, std::int64_t padded_k) {
  if (group == padded_k) return 30;
  int shift = 0;
  while (wo::kPadding << shift < group) ++shift;
  return shift;
}

void expect_shape(Checker const& check, char const* argument, TensorView const& view,
                  std::initializer_list<std::int64_t> shape) {
  bool fits = view.rank == static_cast<int>(shape.size());
  std::ostringstream expected;
  int i = 0;
  for (std::int64_t size : shape) {
    expected << (i ? ", " : "") << size;
    fits = fits && view.shape[i] == size;
    ++i;
  }
  if (!fits) check.fail(argument, "expected [", expected.str(), "], got ", describe(view));
  check.vector(argument, view, view.numel());
}

wo::Weight checked(PackedWeight const& w, Checker const& check) {
  if (w.bits != 2 && w.bits != 3 && w.bits != 4 && w.bits != 8)
    check.fail("bits", "expected 2, 3, 4 or 8, got ", w.bits);
  if (w.n < 0 || w.n > kMaxSize) check.fail("n", "expected 0 to ", kMaxSize, ", got ", w.n);
  if (w.k < 0 || w.k > kMaxSize) check.fail("k", "expected 0 to ", kMaxSize, ", got ", w.k);
  if (w.group_size < 1 && w.group_size != -1) check.fail("group_size", "expected -1 or at least 1, got ", w.group_size);
  if (w.zero && w.offset) check.fail("offset", "expected none beside zero, got ", describe(*w.offset));
  std::int64_t const slabs = ceil_div(w.n, wo::kSlab), padded_k = ceil_div(w.k, wo::kPadding) * wo::kPadding;
  std::int64_t const group = w.group_size == -1 ? padded_k : std::min(w.group_size, padded_k);
  std::int64_t const groups = padded_k == 0 ? 0 : ceil_div(padded_k, group);
  check.tensor("weight.q", w.q, {DType::kUInt8});
  check.tensor("weight.scale", w.scale, {DType::kFloat16, DType::kBFloat16, DType::kFloat32});
  expect_shape(check, "weight.q", w.q, {slabs, padded_k / wo::depth(w.bits), wo::kLanes, wo::lane_bytes(w.bits)});
  expect_shape(check, "weight.scale", w.scale, {slabs, groups, wo::kSlab});
  check.aligned16("weight.q", w.q);
  check.aligned16("weight.scale", w.scale);
  if (w.zero) {
    check.tensor("weight.zero", *w.zero, {DType::kUInt8});
    expect_shape(check, "weight.zero", *w.zero, {slabs, groups, wo::kSlab});
    check.aligned16("weight.zero", *w.zero);
  }
  if (w.offset) {
    check.tensor("weight.offset", *w.offset, {w.scale.dtype});
    expect_shape(check, "weight.offset", *w.offset, {slabs, groups, wo::kSlab});
    check.aligned16("weight.offset", *w.offset);
  }
  return {static_cast<int>(w.n),
          static_cast<int>(w.k),
          static_cast<int>(padded_k),
          w.bits,
          static_cast<int>(std::max<std::int64_t>(group, 1)),
          static_cast<int>(groups),
          group_shift(group, padded_k),
          w.q.as<std::uint8_t>(),
          w.scale.data,
          w.zero ? w.zero->as<std::uint8_t>() : nullptr,
          w.offset ? w.offset->data : nullptr,
          w.scale.dtype};
}

void check_apart(Checker const& check, TensorView const& out, PackedWeight const& w) {
  check.apart("out", out, "weight.q", w.q);
  check.apart("out", out, "weight.scale", w.scale);
  if (w.zero) check.apart("out", out, "weight.zero", *w.zero);
  if (w.offset) check.apart("out", out, "weight.offset", *w.offset);
}

wo::Problem checked(WeightOnlyMm const& call) {
  Checker const check("weight_only_mm", call.x.device);
  check.tensor("x", call.x, {DType::kFloat16, DType::kBFloat16, DType::kFloat32});
  wo::Weight const weight = checked(call.weight, check);
  Matrix const x = check.rows("x", call.x);
  if (x.cols != weight.k) check.fail("x", "expected ", weight.k, " columns, got ", describe(call.x));
  if (x.rows > kMaxSize) check.fail("x", "expected at most ", kMaxSize, " rows, got ", x.rows);
  check.tensor("out", call.out, {call.x.dtype});
  Matrix const out = check.rows("out", call.out);
  bool const same_rows =
      std::equal(call.x.shape.begin(), call.x.shape.begin() + call.x.rank - 1, call.out.shape.begin());
  if (call.out.rank != call.x.rank || !same_rows || out.cols != weight.n) {
    check.fail("out", "expected x's leading dimensions and ", weight.n, " columns, got ", describe(call.out));
  }
  if (call.bias) {
    check.tensor("bias", *call.bias, {call.x.dtype});
    check.vector("bias", *call.bias, weight.n);
    check.apart("out", call.out, "bias", *call.bias);
  }
  if (!(call.lo <= call.hi)) check.fail("clamp", "expected lo <= hi, got (", call.lo, ", ", call.hi, ")");
  check.apart("out", call.out, "x", call.x);
  check_apart(check, call.out, call.weight);
  return {weight,
          static_cast<int>(x.rows),
          x.stride,
          out.stride,
          call.x.data,
          call.out.data,
          call.bias ? call.bias->data : nullptr,
          call.lo,
          call.hi};
}

wo::DequantizeProblem checked(DequantizeWeight const& call) {
  Checker const check("dequantize_weight", call.out.device);
  check.tensor("out", call.out, {DType::kFloat16, DType::kBFloat16, DType::kFloat32});
  wo::Weight const weight = checked(call.weight, check);
  expect_shape(check, "out", call.out, {weight.n, weight.k});
  if (call.out.device.type == Device::Type::kCuda) check.aligned16("out", call.out);
  check_apart(check, call.out, call.weight);
  return {weight, call.out.data, call.out.dtype};
}

WeightOnlyMmProblem problem_of(wo::Problem const& p, WeightOnlyMm const& call) {
  bool const aligned = reinterpret_cast<std::uintptr_t>(p.x) % 16 == 0 && (p.m == 1 || p.stride_x % 8 == 0);
  return {p.m,
          p.weight.n,
          p.weight.k,
          p.weight.bits,
          call.weight.group_size,
          call.x.dtype,
          aligned,
          static_cast<int>(size_of(p.weight.scale_dtype)),
          p.weight.zero != nullptr ? 1 : 0,
          p.weight.offset != nullptr};
}

Target target_of(WeightOnlyMm const& call) {
  if (call.x.device.type == Device::Type::kCuda) return wo::target_of_device(call.x.device.index);
  return wo::nominal(forced_arch());
}

wo::Choice choice_of(wo::Problem const& problem, WeightOnlyMm const& call) {
  WeightOnlyMmProblem const p = problem_of(problem, call);
  return call.kernel ? wo::choose(p, target_of(call), *call.kernel) : wo::choose(p, target_of(call));
}

bool is_empty(wo::Problem const& p) { return p.m == 0 || p.weight.n == 0; }

}  // namespace

void check(WeightOnlyMm const& call) { checked(call); }
void check(DequantizeWeight const& call) { checked(call); }

bool weight_only_mm(WeightOnlyMm const& call, Stream stream) {
  wo::Problem const problem = checked(call);
  if (is_empty(problem)) return true;
  if (call.x.device.type == Device::Type::kCpu) {
    if (problem.m <= wo::kHostTokens) wo::multiply_on_host(problem, call.x.dtype);
    return problem.m <= wo::kHostTokens;
  }
  wo::Choice const choice = choice_of(problem, call);
  if (choice.family == wo::Family::kDense) return false;
  wo::launch(choice, problem, call.x.dtype, call.x.device.index, stream);
  return true;
}

void dequantize_weight(DequantizeWeight const& call, Stream stream) {
  wo::DequantizeProblem const problem = checked(call);
  if (problem.weight.n == 0 || problem.weight.k == 0) return;
  if (call.out.device.type == Device::Type::kCpu) return wo::dequantize_on_host(problem);
  wo::launch_dequantize(problem, call.out.device.index, stream);
}

std::string explain_weight_only_mm(WeightOnlyMmProblem const& problem, Arch arch, int sm_count) {
  Target target = wo::nominal(arch);
  if (sm_count > 0) target.sm_count = sm_count;
  return wo::describe(wo::choose(problem, target));
}

std::string explain(WeightOnlyMm const& call) {
  wo::Problem const problem = checked(call);
  if (is_empty(problem)) return "nothing to launch: the output is empty";
  if (call.x.device.type == Device::Type::kCpu && forced_arch() == Arch::kAuto) {
    return problem.m <= wo::kHostTokens ? "cpu, straight from the packed integers"
                                        : "cpu, de-quantised in blocks of rows, fp32 matmul";
  }
  return wo::describe(choice_of(problem, call));
}

}  // namespace epiloq
