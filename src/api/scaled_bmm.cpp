#include "epiloq/scaled_bmm.h"

#include <algorithm>
#include <utility>

#include "core/checks.h"
#include "cpu/gemm/float8.h"
#include "cpu/gemm/int8.h"
#include "cpu/gemm/scaled_mm.h"
#include "dispatch/arch.h"
#include "dispatch/scaled_mm/launch.h"
#include "dispatch/scaled_mm/select.h"
#include "epiloq/batch_invariant.h"
#include "epiloq/scaled_mm.h"

namespace epiloq {
namespace {

constexpr std::int64_t kMaxInt8K = (std::int64_t{1} << 31) / (128 * 128) - 1;  // int32 sums stay exact
constexpr std::int64_t kMaxSize = (std::int64_t{1} << 31) - 1 - 512;           // rounded up to a tile, still an int
constexpr std::int64_t kMaxColumns = 65535 * 64;                               // grid limit with the smallest tile
constexpr std::int64_t kMaxBatches = 65535;                                    // and its third

// [batches, rows, cols] with dense rows.
struct Matrices {
  std::int64_t batches = 0, rows = 0, cols = 0;
  std::int64_t stride = 0, batch_stride = 0;
};

// One value per row or column of each product, per product, or in all.
struct Scales {
  bool is_vector = false;
  std::int64_t batch_stride = 0;
};

struct Sizes {
  Matrices out, a, weight;
  Scales scale_a, scale_b;
};

bool is_float8(ScaledBmm const& call) {
  return call.a.dtype == DType::kFloat8E4M3 || call.a.dtype == DType::kFloat8E5M2;
}

Matrices matrices(Checker const& check, char const* argument, TensorView const& view, char const* dense_dimension) {
  Matrices const m{view.size(0), view.size(1), view.size(2), std::max(view.stride(1), view.size(2)),
                   view.size(0) == 1 ? 0 : view.stride(0)};
  if (view.numel() == 0) return m;
  if (m.cols > 1 && view.stride(2) != 1) {
    check.fail(argument, "expected stride 1 along ", dense_dimension, ", got ", view.stride(2), " in ", describe(view));
  }
  if ((m.rows > 1 && view.stride(1) < m.cols) || m.batch_stride < 0) {
    check.fail(argument, "expected rows that do not overlap, got strides [", view.stride(0), ", ", view.stride(1),
               "] of rows of ", m.cols, " elements");
  }
  return m;
}

void check_out(ScaledBmm const& call, Checker const& check, Sizes& sizes) {
  if (call.scale_out) {
    if (is_float8(call)) check.fail("a", "expected int8 with scale_out, got ", describe(call.a));
    check.tensor("out", call.out, {DType::kInt8});
    check.tensor("scale_out", *call.scale_out, {DType::kFloat32});
    check.scalar("scale_out", *call.scale_out);
    check.apart("out", call.out, "scale_out", *call.scale_out);
  } else {
    check.tensor("out", call.out, kFloats);
  }
  std::int64_t const batches = sizes.a.batches, m = sizes.a.rows, n = sizes.weight.rows;
  if (call.out.rank != 3 || call.out.size(0) != batches || call.out.size(1) != m || call.out.size(2) != n) {
    check.fail("out", "expected [", batches, ", ", m, ", ", n, "], got ", describe(call.out));
  }
  sizes.out = matrices(check, "out", call.out, "N");
  // The larger of the row and batch strides must step over all of the other dimension.
  std::int64_t const across = (m - 1) * sizes.out.stride + n, along = (batches - 1) * sizes.out.batch_stride + n;
  bool const apart = sizes.out.batch_stride >= across || (m > 1 && sizes.out.stride >= along);
  if (call.out.numel() != 0 && batches > 1 && (!apart || sizes.out.batch_stride < n)) {
    check.fail("out", "expected batches that do not overlap, got strides [", call.out.stride(0), ", ",
               call.out.stride(1), "] in ", describe(call.out));
  }
}

// scale: dimension `along` (1 or 2) has `count` values; the other has 1.
Scales check_scale(Checker const& check, char const* argument, TensorView const& scale, std::int64_t batches, int along,
                   std::int64_t count, char const* expected) {
  check.tensor(argument, scale, {DType::kFloat32});
  if (scale.numel() == 1) return {};
  bool const has_shape = scale.rank == 3 && scale.size(0) == batches && scale.size(3 - along) == 1 &&
                         (scale.size(along) == count || scale.size(along) == 1);
  if (!has_shape) check.fail(argument, "expected one element, [B, 1, 1] or ", expected, ", got ", describe(scale));
  bool const is_vector = scale.size(along) > 1;
  if (scale.stride(0) < 0 || (is_vector && scale.stride(along) != 1)) {
    check.fail(argument, "expected neighbours in memory for neighbouring rows or columns, got stride ",
               scale.stride(along), " in ", describe(scale), "; call .contiguous()");
  }
  return {is_vector, batches == 1 ? 0 : scale.stride(0)};
}

void check_limits(ScaledBmm const& call, Checker const& check, Sizes const& sizes) {
  std::int64_t const limit = is_float8(call) ? kMaxSize : kMaxInt8K;
  if (sizes.a.cols > limit) check.fail("a", "expected K of at most ", limit, ", got ", sizes.a.cols);
  if (sizes.a.rows > kMaxSize) check.fail("a", "expected at most ", kMaxSize, " rows, got ", sizes.a.rows);
  if (sizes.a.batches > kMaxBatches) {
    check.fail("a", "expected at most ", kMaxBatches, " products in a batch, got ", sizes.a.batches);
  }
  if (sizes.weight.rows > kMaxColumns) {
    check.fail("b", "expected at most ", kMaxColumns, " columns, got ", sizes.weight.rows);
  }
}

Sizes checked(ScaledBmm const& call) {
  Checker const check("scaled_bmm", call.a.device);
  Sizes sizes;
  check.tensor("a", call.a, {DType::kInt8, DType::kFloat8E4M3, DType::kFloat8E5M2});
  if (is_float8(call)) {
    check.tensor("b", call.b, {DType::kFloat8E4M3, DType::kFloat8E5M2});
  } else {
    check.tensor("b", call.b, {DType::kInt8});
  }
  if (call.a.rank != 3) check.fail("a", "expected 3 dimensions [B, M, K], got ", describe(call.a));
  std::int64_t const batches = call.a.size(0), k = call.a.size(2);
  if (call.b.rank != 3 || call.b.size(0) != batches || call.b.size(1) != k) {
    check.fail("b", "expected [", batches, ", ", k, ", N] to follow a, got ", describe(call.b));
  }
  sizes.a = matrices(check, "a", call.a, "K");
  sizes.weight = matrices(check, "b", transposed(call.b), "K (the transpose of rows [B, N, K])");
  check_out(call, check, sizes);
  sizes.scale_a = check_scale(check, "scale_a", call.scale_a, batches, 1, sizes.a.rows, "[B, M, 1]");
  sizes.scale_b = check_scale(check, "scale_b", call.scale_b, batches, 2, sizes.weight.rows, "[B, 1, N]");
  check_limits(call, check, sizes);
  for (auto const& [argument, view] : {std::pair("a", &call.a), {"b", &call.b}, {"out", &call.out}}) {
    check.aligned16(argument, *view);
  }
  for (auto const& [argument, view] :
       {std::pair("a", &call.a), {"b", &call.b}, {"scale_a", &call.scale_a}, {"scale_b", &call.scale_b}}) {
    check.apart("out", call.out, argument, *view);
  }
  return sizes;
}

ScaledMmProblem problem_of(ScaledBmm const& call, Sizes const& s) {
  auto const whole = [](Matrices const& m, int per_16_bytes) {
    return m.cols % per_16_bytes == 0 && m.stride % per_16_bytes == 0 && m.batch_stride % per_16_bytes == 0;
  };
  bool const aligned = whole(s.a, 16) && whole(s.weight, 16) && whole(s.out, 8);
  return {.m = s.a.rows,
          .n = s.weight.rows,
          .k = s.a.cols,
          .aligned = aligned,
          .a = call.a.dtype,
          .b = call.b.dtype,
          .batches = s.a.batches,
          .int8_out = call.out.dtype == DType::kInt8,
          .batch_invariant = batch_invariant()};
}

ops::scaled_mm::Choice choice_of(ScaledBmm const& call, ScaledMmProblem const& problem) {
  if (call.out.dtype == DType::kFloat32) {
    throw Unsupported("epiloq.scaled_bmm: out: CUDA kernels write float16, bfloat16 or int8, got float32");
  }
  auto const set = is_float8(call) ? KernelSet::kFloat8Gemm : KernelSet::kInt8Gemm;
  return ops::scaled_mm::Selection::choose(problem, target_of("scaled_bmm", set, call.a.device));
}

epilogue::Operands operands_of(ScaledBmm const& call, Sizes const& sizes) {
  epilogue::Operands operands;
  operands.scale_a = call.scale_a.as<float>();
  operands.scale_b = call.scale_b.as<float>();
  operands.scale_a_is_vector = sizes.scale_a.is_vector;
  operands.scale_b_is_vector = sizes.scale_b.is_vector;
  operands.scale_a_batch = sizes.scale_a.batch_stride;
  operands.scale_b_batch = sizes.scale_b.batch_stride;
  if (call.scale_out) operands.scale_out = call.scale_out->as<float>();
  return operands;
}

gemm::Types types_of(ScaledBmm const& call) { return {call.a.dtype, call.b.dtype, call.out.dtype}; }

gemm::Problem arguments_of(ScaledBmm const& call, Sizes const& s) {
  return {static_cast<int>(s.a.rows),
          static_cast<int>(s.weight.rows),
          static_cast<int>(s.a.cols),
          s.a.stride,
          s.weight.stride,
          s.out.stride,
          call.a.data,
          call.b.data,
          call.out.data,
          operands_of(call, s),
          static_cast<int>(s.a.batches),
          s.a.batch_stride,
          s.weight.batch_stride,
          s.out.batch_stride};
}

}  // namespace

void check(ScaledBmm const& call) { checked(call); }

void scaled_bmm(ScaledBmm const& call, Stream stream) {
  Sizes const sizes = checked(call);
  expect_device("scaled_bmm", "a", call.a, Device::Type::kCuda);
  if (call.out.numel() == 0) return;
  ops::scaled_mm::launch(choice_of(call, problem_of(call, sizes)), types_of(call), arguments_of(call, sizes),
                         call.a.device.index, stream);
}

void scaled_bmm(ScaledBmm const& call) {
  Sizes const sizes = checked(call);
  expect_device("scaled_bmm", "a", call.a, Device::Type::kCpu);
  if (call.out.numel() == 0) return;
  ops::scaled_mm::run_on_host(arguments_of(call, sizes), types_of(call), call.threads);
}

std::string explain(ScaledBmm const& call) {
  Sizes const sizes = checked(call);
  if (call.out.numel() == 0) return "nothing to launch: the output is empty";
  if (call.a.device.type == Device::Type::kCpu && forced_arch() == Arch::kAuto) {
    return is_float8(call) ? std::string("cpu, ") + float8_routine(sizes.a.rows).name : describe_int8(sizes.a.rows);
  }
  return ops::scaled_mm::describe(choice_of(call, problem_of(call, sizes)));
}

}  // namespace epiloq
