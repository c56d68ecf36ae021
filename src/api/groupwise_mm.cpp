#include "epiloq/groupwise_mm.h"

#include <algorithm>
#include <limits>

#include "core/checks.h"
#include "cpu/gemm/float8.h"
#include "cpu/gemm/groupwise_mm.h"
#include "cpu/gemm/int8.h"
#include "dispatch/arch.h"
#include "dispatch/choice_cache.h"
#include "dispatch/groupwise_mm/launch.h"
#include "dispatch/groupwise_mm/select.h"
#include "epiloq/batch_invariant.h"
#include "problems/groupwise_gemm.h"

namespace epiloq {
namespace {

constexpr std::int64_t kMaxSize = (std::int64_t{1} << 31) - 1 - 512;  // rounded up to a tile, still an int
constexpr int kBlock = gemm::kGroupDepth;
constexpr int kAllOfK = -1;
constexpr std::int64_t kMaxInt8K = (std::int64_t{1} << 31) / (128 * 128) - 1;  // int32 sums stay exact

std::int64_t blocks_of(std::int64_t size, int per_scale) { return (size + per_scale - 1) / per_scale; }

struct Sizes {
  Matrix out, a;
  std::int64_t n = 0, k = 0, experts = 1;
  std::int64_t stride_b = 0;
  gemm::GroupScales scale_a, scale_b;
  int scale_b_expert = 0;
};

bool has_experts(GroupwiseMm const& call) { return call.offs || call.masked_m; }

bool has_per_row_scales(GroupwiseMm const& call) { return call.depth_per_scale == kAllOfK; }

char const* name_of(GroupwiseMm const& call) { return has_experts(call) ? "grouped_mm" : "groupwise_mm"; }

// b: columns dense; with experts contiguous matrices.
void check_b(GroupwiseMm const& call, Checker const& check, Sizes& sizes) {
  check.tensor("b", call.b, {call.a.dtype});
  int const rank = has_experts(call) ? 3 : 2;
  if (call.b.rank != rank) {
    check.fail("b", "expected ", rank, " dimensions ", rank == 3 ? "[E, K, N]" : "[K, N]", ", got ", describe(call.b));
  }
  if (call.b.size(-2) != sizes.k) {
    check.fail("b", "expected ", sizes.k, " rows to follow a's columns, got ", describe(call.b));
  }
  sizes.n = call.b.size(-1);
  if (sizes.k > 1 && sizes.n > 1 && call.b.stride(-2) != 1) {
    check.fail("b", "expected column-major memory (stride 1 along K), got strides ending in ", call.b.stride(-2), ", ",
               call.b.stride(-1), "; pass the transpose of a contiguous weight […, N, K]");
  }
  Matrix const weight = check.rows("b", transposed(call.b));
  sizes.stride_b = weight.stride;
  sizes.experts = rank == 3 ? call.b.size(0) : 1;
}

// scale: a value for each of `rows` and 128 of K, any strides.
gemm::GroupScales check_scale(Checker const& check, char const* argument, char const* things, TensorView const& scale,
                              int row_dim, int k_dim, std::int64_t rows, std::int64_t blocks, int per_scale,
                              int depth) {
  if (scale.size(row_dim) != rows || scale.size(k_dim) != blocks) {
    std::string const of_k = depth == kAllOfK ? "all" : std::to_string(depth);
    check.fail(argument, "expected ", rows, " x ", blocks, " scales (one for ", per_scale, " of the ", things, " and ",
               of_k, " of K), got ", describe(scale));
  }
  std::int64_t reach = 0;
  for (int i = 0; i < scale.rank; ++i) {
    if (scale.strides[i] < 0) check.fail(argument, "expected strides that are not negative, got ", scale.strides[i]);
    reach += std::max<std::int64_t>(scale.shape[i] - 1, 0) * scale.strides[i];
  }
  if (reach > kMaxSize) check.fail(argument, "expected at most 2^31 elements of memory, got a reach of ", reach);
  return {scale.as<float>(), static_cast<int>(scale.stride(row_dim)), static_cast<int>(scale.stride(k_dim)),
          per_scale == 1 ? gemm::GroupScales::kPerRow : gemm::GroupScales::kPerBlock};
}

// scale_a as a matrix: leading dimensions must equal a's, and collapse like them.
TensorView scale_rows(GroupwiseMm const& call, Checker const& check) {
  TensorView const& scale = call.scale_a;
  if (scale.rank == 2 && !call.masked_m) return scale;
  bool const like_a = scale.rank == call.a.rank && call.rows_per_scale == 1 &&
                      std::equal(scale.shape.begin(), scale.shape.begin() + scale.rank - 1, call.a.shape.begin());
  if (!like_a) {
    check.fail("scale_a", call.masked_m ? "expected" : "expected two dimensions, or",
               " a scale a row and a's leading dimensions, got ", describe(scale), " for ", describe(call.a));
  }
  std::int64_t rows = 1, stride = 0;
  for (int i = scale.rank - 2; i >= 0; --i) {
    if (scale.shape[i] == 1) continue;
    if (rows == 1) stride = scale.strides[i];
    if (scale.numel() != 0 && scale.strides[i] != stride * rows) {
      check.fail("scale_a", "expected leading dimensions that collapse into one, got ", describe(scale),
                 "; call .contiguous()");
    }
    rows *= scale.shape[i];
  }
  TensorView matrix(scale.data, scale.dtype, scale.device, {rows, scale.size(-1)});
  matrix.strides = {stride, scale.stride(-1)};
  return matrix;
}

void check_scales(GroupwiseMm const& call, Checker const& check, Sizes& sizes) {
  bool const known = (call.rows_per_scale == 1 && call.columns_per_scale == 128) ||
                     (call.rows_per_scale == 128 && call.columns_per_scale == 128) ||
                     (call.rows_per_scale == 1 && call.columns_per_scale == 1);
  bool const known_depth =
      call.depth_per_scale == kBlock || (has_per_row_scales(call) && has_experts(call) && call.columns_per_scale == 1);
  if (!known || !known_depth) {
    check.fail("recipe", "expected (1, 128, 128), (128, 128, 128) or (1, 1, 128), or with experts (1, 1, -1), got (",
               call.rows_per_scale, ", ", call.columns_per_scale, ", ", call.depth_per_scale, ")");
  }
  if (has_experts(call) && call.rows_per_scale != 1) {
    check.fail("recipe", "expected one scale a row with experts, whose rows begin anywhere, got ", call.rows_per_scale,
               " rows a scale");
  }
  std::int64_t const blocks = has_per_row_scales(call) ? 1 : blocks_of(sizes.k, kBlock);
  TensorView const scale_a = scale_rows(call, check);
  sizes.scale_a = check_scale(check, "scale_a", "rows", scale_a, 0, 1, blocks_of(sizes.a.rows, call.rows_per_scale),
                              blocks, call.rows_per_scale, call.depth_per_scale);
  int const rank = has_experts(call) ? 3 : 2;
  if (call.scale_b.rank != rank) {
    check.fail("scale_b", "expected ", rank, " dimensions as b has, got ", describe(call.scale_b));
  }
  if (rank == 3 && call.scale_b.size(0) != sizes.experts) {
    check.fail("scale_b", "expected ", sizes.experts, " experts' scales, got ", describe(call.scale_b));
  }
  sizes.scale_b =
      check_scale(check, "scale_b", "columns", call.scale_b, -1, -2, blocks_of(sizes.n, call.columns_per_scale), blocks,
                  call.columns_per_scale, call.depth_per_scale);
  if (rank == 3) sizes.scale_b_expert = static_cast<int>(call.scale_b.stride(0));
}

void check_out_and_bias(GroupwiseMm const& call, Checker const& check, Sizes& sizes) {
  check.tensor("out", call.out, kFloats);
  check.tensor("scale_a", call.scale_a, {DType::kFloat32});
  check.tensor("scale_b", call.scale_b, {DType::kFloat32});
  sizes.out = check.rows_like("out", call.out, "a", call.a, sizes.n);
  check.bias(call.bias, call.out, sizes.n);
  check.apart("out", call.out, "a", call.a);
  check.apart("out", call.out, "b", call.b);
  check.apart("out", call.out, "scale_a", call.scale_a);
  check.apart("out", call.out, "scale_b", call.scale_b);
}

void check_experts(GroupwiseMm const& call, Checker const& check, Sizes const& sizes) {
  if (call.offs && call.masked_m) check.fail("masked_m", "expected either offs or masked_m, got both");
  if (call.offs) {
    check.tensor("offs", *call.offs, {DType::kInt32});
    check.vector("offs", *call.offs, sizes.experts);
    check.apart("out", call.out, "offs", *call.offs);
    if (call.a.rank != 2) check.fail("a", "expected [M, K] with offs, got ", describe(call.a));
  }
  if (call.masked_m) {
    check.tensor("masked_m", *call.masked_m, {DType::kInt32});
    check.vector("masked_m", *call.masked_m, sizes.experts);
    check.apart("out", call.out, "masked_m", *call.masked_m);
    if (call.a.rank != 3 || call.a.size(0) != sizes.experts) {
      check.fail("a", "expected [", sizes.experts, ", M, K] with masked_m, got ", describe(call.a));
    }
  }
}

Sizes checked(GroupwiseMm const& call) {
  Checker const check(name_of(call), call.a.device);
  Sizes sizes;
  if (has_per_row_scales(call)) {
    check.tensor("a", call.a, {DType::kInt8, DType::kFloat8E4M3});
  } else {
    check.tensor("a", call.a, {DType::kFloat8E4M3});
  }
  sizes.a = check.rows("a", call.a);
  sizes.k = sizes.a.cols;
  check_b(call, check, sizes);
  check_out_and_bias(call, check, sizes);
  check_experts(call, check, sizes);
  check_scales(call, check, sizes);
  constexpr std::int64_t kMaxColumns = 65535 * 128;  // grid limit of the generic kernel
  if (sizes.a.rows > kMaxSize || sizes.k > kMaxSize)
    check.fail("a", "expected at most 2^31 - 513 rows and columns, got ", describe(call.a));
  if (call.a.dtype == DType::kInt8 && sizes.k > kMaxInt8K) {
    check.fail("a", "expected K of at most ", kMaxInt8K, ", where int32 sums are exact, got ", sizes.k);
  }
  if (sizes.n > kMaxColumns || sizes.experts * sizes.n > kMaxSize) {
    check.fail("b", "expected at most ", kMaxColumns, " columns, got ", describe(call.b));
  }
  check.aligned16("a", call.a);
  check.aligned16("b", call.b);
  check.aligned16("out", call.out);
  return sizes;
}

GroupwiseMmProblem problem_of(GroupwiseMm const& call, Sizes const& sizes) {
  bool const aligned = sizes.a.stride % 16 == 0 && sizes.stride_b % 16 == 0;
  bool const per_row_scales = has_per_row_scales(call), column_scales = call.columns_per_scale == 1;
  return {.m = sizes.a.rows,
          .n = sizes.n,
          .k = sizes.k,
          .column_scales = column_scales,
          .aligned = aligned,
          .experts = static_cast<int>(sizes.experts),
          .per_row_scales = per_row_scales,
          .a = call.a.dtype,
          .has_experts = has_experts(call),
          .batch_invariant = batch_invariant(),
          .whole_row_scales = sizes.scale_a.stride_k == 0 && column_scales && !per_row_scales,
          .out = call.out.dtype};
}

Target target_of(GroupwiseMm const& call) {
  constexpr int kH100 = 132;
  if (call.a.device.type != Device::Type::kCuda) return {forced_arch(), kH100, 0};
  int const device = call.a.device.index;
  auto const set = call.a.dtype == DType::kInt8 ? KernelSet::kInt8Groupwise : KernelSet::kFloat8Groupwise;
  Target const generic{Arch::kAuto, device_properties(device).sm_count, 0};
  return find_target(set, device).value_or(generic);
}

ops::groupwise_mm::Choice choice_of(GroupwiseMm const& call, Sizes const& sizes) {
  GroupwiseMmProblem const problem = problem_of(call, sizes);
  int const device = tuning::index_of(call.a.device);
  return gemm::cached_choice(problem, device, [&] {
    return tuning::choose<ops::groupwise_mm::Selection>(problem, target_of(call), device).choice;
  });
}

bool is_empty(Sizes const& sizes) { return sizes.a.rows == 0 || sizes.n == 0 || sizes.experts == 0; }

gemm::GroupwiseProblem arguments_of(GroupwiseMm const& call, Sizes const& sizes) {
  gemm::GroupwiseProblem p;
  p.m = static_cast<int>(call.masked_m ? call.a.size(1) : sizes.a.rows);
  p.n = static_cast<int>(sizes.n);
  p.k = static_cast<int>(sizes.k);
  p.experts = static_cast<int>(sizes.experts);
  p.depth = has_per_row_scales(call) ? std::max(p.k, 1) : kBlock;
  p.stride_a = sizes.a.stride, p.stride_b = sizes.stride_b, p.stride_d = sizes.out.stride;
  p.a = call.a.data, p.b = call.b.data, p.d = call.out.data;
  p.scale_a = sizes.scale_a, p.scale_b = sizes.scale_b, p.scale_b_expert = sizes.scale_b_expert;
  p.bias = call.bias ? call.bias->data : nullptr;
  p.offs = call.offs ? call.offs->as<std::int32_t>() : nullptr;
  p.masked_m = call.masked_m ? call.masked_m->as<std::int32_t>() : nullptr;
  p.constant_b = call.constant_b && !has_experts(call);
  return p;
}

// On the CPU, where the counts can be read.
void check_rows_of_experts(GroupwiseMm const& call, gemm::GroupwiseProblem const& p) {
  Checker const check(name_of(call), call.a.device);
  for (int e = 0; e < p.experts && has_experts(call); ++e) {
    if (p.masked_m != nullptr && (p.masked_m[e] < 0 || p.masked_m[e] > p.m)) {
      check.fail("masked_m", "expected 0 to ", p.m, " rows each, got ", p.masked_m[e], " of expert ", e);
    }
    int const begin = e == 0 || p.offs == nullptr ? 0 : p.offs[e - 1];
    if (p.offs != nullptr && (p.offs[e] < begin || p.offs[e] > p.m)) {
      check.fail("offs", "expected ascending ends of at most ", p.m, " rows, got ", p.offs[e], " of expert ", e,
                 ", which begins at ", begin);
    }
  }
}

}  // namespace

void check(GroupwiseMm const& call) { checked(call); }

void groupwise_mm(GroupwiseMm const& call, Stream stream) {
  Sizes const sizes = checked(call);
  expect_device(name_of(call), "a", call.a, Device::Type::kCuda);
  if (is_empty(sizes)) return;
  ops::groupwise_mm::launch(choice_of(call, sizes), arguments_of(call, sizes), call.a.dtype, call.out.dtype,
                            call.a.device.index, stream);
}

void groupwise_mm(GroupwiseMm const& call) {
  Sizes const sizes = checked(call);
  expect_device(name_of(call), "a", call.a, Device::Type::kCpu);
  gemm::GroupwiseProblem const problem = arguments_of(call, sizes);
  check_rows_of_experts(call, problem);
  if (is_empty(sizes)) return;
  ops::groupwise_mm::run_on_host(problem, {call.a.dtype, call.b.dtype, call.out.dtype}, has_per_row_scales(call),
                                 call.threads);
}

std::string explain_groupwise_mm(GroupwiseMmProblem const& requested, Arch arch, int sm_count, bool terms) {
  GroupwiseMmProblem const problem = tuning::as_set(requested);
  if (problem.m < 0 || problem.n < 0 || problem.k < 0 || problem.experts < 1) {
    throw InvalidArgument("epiloq.explain: groupwise_mm: expected sizes of at least 0 and experts of at least 1");
  }
  if (problem.a != DType::kFloat8E4M3 && !(problem.a == DType::kInt8 && problem.per_row_scales)) {
    throw InvalidArgument("epiloq.explain: dtype: expected float8_e4m3fn, or int8 with per_row_scales, got " +
                          std::string(name(problem.a)));
  }
  // Of every architecture: those without a kernel of the operation run the generic one.
  Target target = nominal(KernelSet::kInt8Gemm, arch);
  if (sm_count > 0) target.sm_count = sm_count;
  auto const choice = ops::groupwise_mm::Selection::choose(problem, target);
  if (!terms) return ops::groupwise_mm::describe(choice);
  return tuning::explain_terms<ops::groupwise_mm::Selection>(problem, target, {choice});
}

std::string explain(GroupwiseMm const& call, bool terms) {
  Sizes const sizes = checked(call);
  if (is_empty(sizes)) return "nothing to launch: the output is empty";
  if (call.a.device.type == Device::Type::kCpu && forced_arch() == Arch::kAuto) {
    std::int64_t const rows = std::max<std::int64_t>(sizes.a.rows / sizes.experts, 1);
    std::string const words =
        call.a.dtype == DType::kInt8 ? describe_int8(rows) : std::string("cpu, ") + float8_routine(rows).name;
    return has_experts(call) ? words + ", expert by expert" : words;
  }
  return tuning::explain<ops::groupwise_mm::Selection>(problem_of(call, sizes), target_of(call),
                                                       tuning::index_of(call.a.device), terms);
}

KernelCandidates candidates(GroupwiseMmProblem const& problem, int device) {
  auto const set = problem.a == DType::kInt8 ? KernelSet::kInt8Groupwise : KernelSet::kFloat8Groupwise;
  return tuning::candidates<ops::groupwise_mm::Selection>(problem, target_of_index("groupwise_mm", set, device));
}

}  // namespace epiloq
