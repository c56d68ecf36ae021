#include "epiloq/scaled_mm.h"

#include "core/checks.h"
#include "cpu/gemm/float8.h"
#include "cpu/gemm/int8.h"
#include "cpu/gemm/scaled_mm.h"
#include "dispatch/arch.h"
#include "dispatch/choice_cache.h"
#include "dispatch/scaled_mm/launch.h"
#include "dispatch/scaled_mm/select.h"
#include "epilogue/eval.h"
#include "epilogue/library.h"
#include "epiloq/batch_invariant.h"
#include "problems/gemm.h"

namespace epiloq {
namespace {

// |a| <= 128 and |b| <= 128 keep the int32 sum of K products exact up to 2^31 / 128^2; a zero point in [-128, 127]
// makes the left factor as large as 255.
constexpr std::int64_t kMaxK = (std::int64_t{1} << 31) / (128 * 128) - 1;
constexpr std::int64_t kMaxKWithZeroPoint = ((std::int64_t{1} << 31) - 1) / (255 * 128);
constexpr std::int64_t kMaxRows = (std::int64_t{1} << 31) - 1;
constexpr std::int64_t kMaxColumns = 65535 * 64;  // grid limit with the smallest tile

struct Sizes {
  Matrix out, a, weight;
};

bool is_float8(ScaledMm const& call) {
  return call.a.dtype == DType::kFloat8E4M3 || call.a.dtype == DType::kFloat8E5M2;
}

Sizes check_operands(ScaledMm const& call, Checker const& check) {
  check.tensor("a", call.a, {DType::kInt8, DType::kFloat8E4M3, DType::kFloat8E5M2});
  if (is_float8(call)) {
    check.tensor("b", call.b, {DType::kFloat8E4M3, DType::kFloat8E5M2});
  } else {
    check.tensor("b", call.b, {DType::kInt8});
  }
  check.tensor("out", call.out, kFloats);
  Sizes sizes;
  sizes.a = check.rows("a", call.a);
  std::int64_t const k = sizes.a.cols;
  if (call.b.rank != 2) check.fail("b", "expected 2 dimensions [K, N], got ", describe(call.b));
  std::int64_t const n = call.b.size(1);
  if (call.b.size(0) != k)
    check.fail("b", "expected [", k, ", N] to follow a's ", k, " columns, got ", describe(call.b));
  if (k > 1 && n > 1 && call.b.stride(0) != 1) {
    check.fail("b", "expected column-major memory (stride 1 along K), got strides [", call.b.stride(0), ", ",
               call.b.stride(1), "]; pass weight.t() of a contiguous weight [N, K], or b.t().contiguous().t()");
  }
  sizes.weight = check.rows("b", transposed(call.b));
  sizes.out = check.rows_like("out", call.out, "a", call.a, n);
  if (sizes.a.rows > kMaxRows) check.fail("a", "expected at most ", kMaxRows, " rows, got ", sizes.a.rows);
  if (n > kMaxColumns) check.fail("b", "expected at most ", kMaxColumns, " columns, got ", n);
  check.aligned16("a", call.a);
  check.aligned16("b", call.b);
  check.aligned16("out", call.out);
  return sizes;
}

// `rows`: the rows that scale_a and azp may have a value for.
void check_epilogue(ScaledMm const& call, Checker const& check, TensorView const& rows, std::int64_t n) {
  check.tensor("scale_a", call.scale_a, {DType::kFloat32});
  check.tensor("scale_b", call.scale_b, {DType::kFloat32});
  check.scalar_or_rows("scale_a", call.scale_a, "a", rows);
  check.scalar_or_columns("scale_b", call.scale_b, n);
  check.bias(call.bias, call.out, n);
  if (call.azp_adj) {
    if (is_float8(call)) check.fail("a", "expected int8 with a zero point, got ", describe(call.a));
    check.tensor("azp_adj", *call.azp_adj, {DType::kInt32});
    check.vector("azp_adj", *call.azp_adj, n);
  }
  if (call.azp) {
    if (!call.azp_adj) check.fail("azp_adj", "expected the column sums of b with azp, got none");
    check.tensor("azp", *call.azp, {DType::kInt32});
    check.scalar_or_rows("azp", *call.azp, "a", rows);
  }
}

void check_range_and_overlap(ScaledMm const& call, Checker const& check, std::int64_t k) {
  std::int64_t const limit = call.azp_adj ? kMaxKWithZeroPoint : kMaxK;
  if (is_float8(call)) {
    constexpr std::int64_t kMaxFloat8K = kMaxRows - 512;  // rounded up to a tile, still an int
    if (k > kMaxFloat8K) check.fail("a", "expected K of at most ", kMaxFloat8K, ", got ", k);
  } else if (k > limit) {
    check.fail("a", "expected K of at most ", limit, call.azp_adj ? " with a zero point" : "",
               ", where int32 sums are exact, got ", k);
  }
  check.apart("out", call.out, "a", call.a);
  check.apart("out", call.out, "b", call.b);
  check.apart("out", call.out, "scale_a", call.scale_a);
  check.apart("out", call.out, "scale_b", call.scale_b);
  if (call.azp_adj) check.apart("out", call.out, "azp_adj", *call.azp_adj);
  if (call.azp) check.apart("out", call.out, "azp", *call.azp);
}

Sizes checked(ScaledMm const& call) {
  Checker const check(call.azp_adj || call.azp ? "scaled_mm_azp" : "scaled_mm", call.a.device);
  Sizes const sizes = check_operands(call, check);
  check_epilogue(call, check, call.a, sizes.weight.rows);
  check_range_and_overlap(call, check, sizes.a.cols);
  return sizes;
}

ScaledMmProblem problem_of(ScaledMm const& call, Sizes const& sizes) {
  auto const whole = [](std::int64_t elements, int per_16_bytes) { return elements % per_16_bytes == 0; };
  bool const aligned = whole(sizes.a.cols, 16) && whole(sizes.a.stride, 16) && whole(sizes.weight.stride, 16) &&
                       whole(sizes.out.cols, 8) && whole(sizes.out.stride, 8);
  return {.m = sizes.a.rows,
          .n = sizes.weight.rows,
          .k = sizes.a.cols,
          .aligned = aligned,
          .a = call.a.dtype,
          .b = call.b.dtype,
          .fast_accum = call.fast_accum,
          .batch_invariant = batch_invariant()};
}

epilogue::Operands operands_of(ScaledMm const& call) {
  epilogue::Operands operands;
  operands.scale_a = call.scale_a.as<float>();
  operands.scale_b = call.scale_b.as<float>();
  operands.scale_a_is_vector = call.scale_a.numel() != 1;
  operands.scale_b_is_vector = call.scale_b.numel() != 1;
  if (call.bias) operands.bias = call.bias->data;
  if (call.azp_adj) operands.azp_adj = call.azp_adj->as<std::int32_t>();
  if (call.azp) {
    operands.azp = call.azp->as<std::int32_t>();
    operands.azp_is_vector = call.azp->numel() != 1;
  }
  return operands;
}

KernelSet kernels_of(DType a) { return a == DType::kInt8 ? KernelSet::kInt8Gemm : KernelSet::kFloat8Gemm; }

Target target_of(ScaledMm const& call) {
  if (call.out.dtype == DType::kFloat32) {
    throw Unsupported("epiloq.scaled_mm: out: CUDA kernels write float16 or bfloat16, got float32");
  }
  return target_of("scaled_mm", kernels_of(call.a.dtype), call.a.device);
}

ops::scaled_mm::Choice choice_of(ScaledMm const& call, Sizes const& sizes) {
  ScaledMmProblem const problem = problem_of(call, sizes);
  int const device = tuning::index_of(call.a.device);
  return gemm::cached_choice(problem, device, [&] {
    return tuning::choose<ops::scaled_mm::Selection>(problem, target_of(call), device).choice;
  });
}

gemm::Problem arguments_of(ScaledMm const& call, Sizes const& sizes) {
  return {static_cast<int>(sizes.a.rows),
          static_cast<int>(sizes.weight.rows),
          static_cast<int>(sizes.a.cols),
          sizes.a.stride,
          sizes.weight.stride,
          sizes.out.stride,
          call.a.data,
          call.b.data,
          call.out.data,
          operands_of(call)};
}

template <class Sum, class Epilogues>
void evaluate(Epilogues list, TensorView const& acc, ScaledMm const& call) {
  epilogue::Operands const operands = operands_of(call);
  epilogue::with_epilogue(list, operands, [&]<class Epilogue>() {
    auto const expr = Epilogue::template make<float>(operands);
    std::int64_t const m = acc.size(0), n = acc.size(1);
    for (std::int64_t i = 0; i < m; ++i) {
      for (std::int64_t j = 0; j < n; ++j) {
        call.out.as<float>()[i * n + j] = epilogue::eval(expr, acc.as<Sum>()[i * n + j], i, j);
      }
    }
  });
}

}  // namespace

void check(ScaledMm const& call) { checked(call); }

void scaled_mm(ScaledMm const& call, Stream stream) {
  Sizes const sizes = checked(call);
  expect_device("scaled_mm", "a", call.a, Device::Type::kCuda);
  if (sizes.a.rows == 0 || sizes.weight.rows == 0) return;
  ops::scaled_mm::launch(choice_of(call, sizes), {call.a.dtype, call.b.dtype, call.out.dtype},
                         arguments_of(call, sizes), call.a.device.index, stream, call.constant_b);
}

void scaled_mm(ScaledMm const& call) {
  Sizes const sizes = checked(call);
  expect_device("scaled_mm", "a", call.a, Device::Type::kCpu);
  if (sizes.a.rows == 0 || sizes.weight.rows == 0) return;
  ops::scaled_mm::run_on_host(arguments_of(call, sizes), {call.a.dtype, call.b.dtype, call.out.dtype}, call.threads);
}

std::string explain_scaled_mm(ScaledMmProblem const& requested, Arch arch, int sm_count, bool terms) {
  ScaledMmProblem const problem = tuning::as_set(requested);
  for (DType operand : {problem.a, problem.b}) {
    if (operand != DType::kInt8 && operand != DType::kFloat8E4M3 && operand != DType::kFloat8E5M2) {
      throw InvalidArgument("epiloq.explain: dtype: expected int8, float8_e4m3fn or float8_e5m2, got " +
                            std::string(name(operand)));
    }
  }
  if (problem.batches < 1) throw InvalidArgument("epiloq.explain: batches: expected at least 1, got fewer");
  if (problem.int8_out && problem.a != DType::kInt8) {
    throw InvalidArgument("epiloq.explain: dtype: expected int8 with an int8 output, got " +
                          std::string(name(problem.a)));
  }
  Target target = nominal(kernels_of(problem.a), arch);
  if (sm_count > 0) target.sm_count = sm_count;
  auto const choice = ops::scaled_mm::Selection::choose(problem, target);
  if (!terms) return ops::scaled_mm::describe(choice);
  return tuning::explain_terms<ops::scaled_mm::Selection>(problem, target, {choice});
}

std::string explain(ScaledMm const& call, bool terms) {
  Sizes const sizes = checked(call);
  if (sizes.a.rows == 0 || sizes.weight.rows == 0) return "nothing to launch: the output is empty";
  if (call.a.device.type == Device::Type::kCpu && forced_arch() == Arch::kAuto) {
    return is_float8(call) ? std::string("cpu, ") + float8_routine(sizes.a.rows).name : describe_int8(sizes.a.rows);
  }
  return tuning::explain<ops::scaled_mm::Selection>(problem_of(call, sizes), target_of(call),
                                                    tuning::index_of(call.a.device), terms);
}

KernelCandidates candidates(ScaledMmProblem const& problem, int device) {
  return tuning::candidates<ops::scaled_mm::Selection>(problem,
                                                       target_of_index("scaled_mm", kernels_of(problem.a), device));
}

void evaluate_epilogue(TensorView const& acc, ScaledMm const& call) {
  Checker const check("evaluate_epilogue", Device{});
  check.tensor("acc", acc, {DType::kInt32, DType::kFloat32});
  check.tensor("out", call.out, {DType::kFloat32});
  Matrix const rows = check.rows("acc", acc);
  if (acc.rank != 2 || call.out.rank != 2 || check.rows("out", call.out).stride != rows.cols ||
      rows.stride != rows.cols || call.out.size(0) != rows.rows) {
    check.fail("out", "expected a contiguous matrix like acc, got ", describe(call.out), " for ", describe(acc));
  }
  check_epilogue(call, check, acc, rows.cols);
  if (acc.dtype == DType::kFloat32) {
    if (call.azp_adj) check.fail("acc", "expected int32 with a zero point, got ", describe(acc));
    return evaluate<float>(epilogue::Float8Epilogues{}, acc, call);
  }
  evaluate<std::int32_t>(epilogue::Int8Epilogues{}, acc, call);
}

}  // namespace epiloq
