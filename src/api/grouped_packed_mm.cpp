#include "epiloq/grouped_packed_mm.h"

#include <algorithm>
#include <limits>

#include "api/checks/packed_weight.h"
#include "core/checks.h"
#include "dispatch/arch.h"
#include "dispatch/grouped_packed_mm/launch.h"
#include "epiloq/batch_invariant.h"
#include "epiloq/tuning.h"

namespace epiloq {
namespace {

namespace wo = ops::weight_only_mm;
namespace grouped = ops::grouped_packed_mm;

struct Checked {
  grouped::Problem problem;
  DType x;
  bool aligned;
  WeightFormat format;
  bool is_kernel_named;
};

// Elements from one expert to the next, in a tensor with a dimension of experts.
std::int64_t expert_stride(TensorView const& view) { return view.rank == 3 ? view.strides[0] : 0; }

Checked checked(GroupedPackedMm const& call) {
  Checker const check("grouped_packed_mm", call.x.device);
  check.tensor("x", call.x, kFloats);
  wo::Weight weight = wo::checked_weight_of_any_format(check, call.weight);
  std::int64_t const experts = call.counts ? call.counts->numel() : 1;
  if (call.counts) {
    check.tensor("counts", *call.counts, {DType::kInt32});
    check.vector("counts", *call.counts, experts);
    if (experts < 1) check.fail("counts", "expected at least one expert, got ", describe(*call.counts));
  } else if (call.masked) {
    check.fail("counts", "expected int32 [E] with masked, got none");
  }
  if (weight.n % experts != 0 || (experts > 1 && weight.n / experts % wo::kPanelRows != 0)) {
    check.fail("weight", "expected ", experts, " matrices of a multiple of ", wo::kPanelRows, " rows, got ", weight.n,
               " rows");
  }
  weight.n = static_cast<int>(weight.n / experts);
  auto const expect_rows = [&](char const* name, TensorView const& view, std::int64_t columns) {
    bool const fits = view.rank == (call.masked ? 3 : 2) && view.shape[view.rank - 1] == columns &&
                      (!call.masked || view.shape[0] == experts);
    if (!fits) {
      check.fail(name, "expected ", call.masked ? "[E, M, " : "[M, ", columns, "], got ", describe(view));
    }
    bool const dense = columns <= 1 || view.strides[view.rank - 1] == 1;
    if (!dense) check.fail(name, "expected dense rows, got ", describe(view));
  };
  expect_rows("x", call.x, weight.k);
  check.tensor("out", call.out, {call.x.dtype});
  expect_rows("out", call.out, weight.n);
  int const rows = call.masked ? 1 : 0;
  std::int64_t const m = call.x.shape[rows];
  if (m > wo::kMaxSize) check.fail("x", "expected at most ", wo::kMaxSize, " rows, got ", m);
  if (call.out.shape[rows] != m) check.fail("out", "expected ", m, " rows, got ", describe(call.out));
  if (call.bias) {
    check.tensor("bias", *call.bias, {call.x.dtype});
    check.shape("bias", *call.bias, {experts, weight.n});
    check.apart("out", call.out, "bias", *call.bias);
  }
  if (call.factor) {
    check.tensor("factor", *call.factor, {DType::kFloat32});
    check.vector("factor", *call.factor, experts);
  }
  check.apart("out", call.out, "x", call.x);
  wo::check_apart(check, call.out, call.weight);
  std::int64_t const stride_x = call.x.strides[rows], stride_out = call.out.strides[rows];
  constexpr float kInfinity = __builtin_inff();
  wo::Problem const product{weight,
                            static_cast<int>(m),
                            stride_x,
                            stride_out,
                            call.x.data,
                            call.out.data,
                            call.bias ? call.bias->data : nullptr,
                            -kInfinity,
                            kInfinity};
  auto const is_multiple = [](std::int64_t stride) { return stride % 8 == 0; };
  bool const aligned = is_aligned(call.x.data) && (m <= 1 || is_multiple(stride_x)) &&
                       (experts <= 1 || is_multiple(expert_stride(call.x)));
  return {{product, static_cast<int>(experts), call.counts ? static_cast<int const*>(call.counts->data) : nullptr,
           call.masked, batch_invariant(), expert_stride(call.x), expert_stride(call.out),
           call.factor ? static_cast<float const*>(call.factor->data) : nullptr},
          call.x.dtype,
          aligned,
          call.weight.format,
          call.kernel.has_value()};
}

// The same of sizes alone: no pointer is read.
Checked checked(GroupedPackedMmProblem const& p) {
  bool const is_integer = p.format == WeightFormat::kInteger;
  Checker const check(is_integer ? "grouped_packed_mm" : "packed_fp4_mm", {});
  int const experts = p.experts.value_or(1);
  for (auto const& [name, size] : {std::pair{"m", p.m}, {"n", p.n}, {"k", p.k}}) {
    if (size < 0 || size > wo::kMaxSize) check.fail(name, "expected 0 to ", wo::kMaxSize, ", got ", size);
  }
  if (std::find(kFloats.begin(), kFloats.end(), p.dtype) == kFloats.end()) {
    check.fail("dtype", "expected float16, bfloat16 or float32, got ", name(p.dtype));
  }
  if (experts < 1) check.fail("experts", "expected at least 1, got ", experts);
  if (experts > 1 && p.n % wo::kPanelRows != 0) {
    check.fail("n", "expected a multiple of ", wo::kPanelRows, " rows per expert, got ", p.n);
  }
  if (p.n * experts > wo::kMaxSize)
    check.fail("n", "expected at most ", wo::kMaxSize, " rows of all experts, got more");
  if (p.masked && !p.experts) check.fail("experts", "expected a number with masked, got none");
  std::int64_t const group_size = is_integer ? p.group_size : p.format == WeightFormat::kMxfp4 ? 32 : 16;
  DType const other = p.dtype == DType::kFloat32 ? DType::kFloat16 : DType::kFloat32;
  wo::Weight const weight =
      wo::weight_of_sizes(check, is_integer ? p.bits : 4, p.n, p.k, group_size, p.same_type ? p.dtype : other);
  static int const some_counts = 0;
  grouped::Problem problem{};
  problem.product.weight = weight;
  problem.product.m = static_cast<int>(p.m);
  problem.product.stride_x = weight.padded_k, problem.product.stride_out = weight.n;
  problem.experts = experts;
  problem.counts = p.experts ? &some_counts : nullptr;
  problem.masked = p.masked;
  problem.batch_invariant = p.batch_invariant || batch_invariant();
  problem.stride_x_expert = (p.m + p.has_gaps) * problem.product.stride_x, problem.stride_out_expert = p.m * weight.n;
  return {problem, p.dtype, true, p.format, false};
}

// Why no kernel supports a problem; null if one does.
char const* unsupported_reason(Checked const& c, Target const& target) {
  wo::Weight const& w = c.problem.product.weight;
  if (c.x == DType::kFloat32) return "float32";
  if (c.x == DType::kBFloat16 && target.arch == Arch::kSm75) return "bfloat16 on sm75";
  if (!c.aligned) return "rows of x that are not 16-byte aligned";
  // A CTA's offsets into an expert have 32 bits.
  std::int64_t const bytes = std::int64_t{w.n} * w.padded_k * w.bits / 8;
  if (bytes > std::numeric_limits<std::int32_t>::max()) return "experts this large";
  std::optional<grouped::Format> const format = grouped::format_of(w, c.format);
  if (!format) return "this format of weights";
  // Tiles of mma.sync would read and convert each weight for every 64 rows.
  bool const is_large = c.problem.counts == nullptr && c.problem.product.m >= grouped::kDenseFromRows;
  bool const is_dense =
      c.format != WeightFormat::kInteger && is_large && !c.is_kernel_named && !c.problem.batch_invariant;
  if (is_dense && !grouped::has_wgmma(c.problem, c.x, *format, target)) return "more than 64 rows";
  return nullptr;
}

grouped::Choice choice_of(Checked const& c, std::optional<GroupedPackedMmKernel> const& kernel, Target const& target) {
  grouped::Format const format = *grouped::format_of(c.problem.product.weight, c.format);
  return kernel ? grouped::choose(c.problem, c.x, format, target, *kernel)
                : grouped::choose(c.problem, c.x, format, target);
}

bool is_empty(grouped::Problem const& p) { return p.product.m == 0 || p.product.weight.n == 0; }

constexpr char const* kEmpty = "nothing to launch: the output is empty";

std::string described(Checked const& c, std::optional<GroupedPackedMmKernel> const& kernel, Target const& target) {
  if (is_empty(c.problem)) return kEmpty;
  char const* const why = unsupported_reason(c, target);
  if (why != nullptr) return std::string("no kernel: ") + why;
  return grouped::describe(choice_of(c, kernel, target));
}

bool is_for_cpu(GroupedPackedMm const& call) {
  if (call.x.device.type != Device::Type::kCpu) return false;
  Checker const check("grouped_packed_mm", call.x.device);
  if (call.counts) check.fail("counts", "expected none on the CPU, got ", describe(*call.counts));
  if (call.weight.format == WeightFormat::kInteger) check.fail("weight", "expected FP4 on the CPU, got integers");
  return true;
}

}  // namespace

void check(GroupedPackedMm const& call) { checked(call); }

bool grouped_packed_mm(GroupedPackedMm const& call, Stream stream) {
  Checked const c = checked(call);
  bool const on_cpu = is_for_cpu(call);
  if (is_empty(c.problem)) return true;
  if (on_cpu) {
    grouped::multiply_on_host(c.problem, c.format, c.x, call.threads);
    return true;
  }
  Target const target = target_of("grouped_packed_mm", KernelSet::kWeightOnly, call.x.device);
  if (c.problem.product.weight.k == 0 || unsupported_reason(c, target) != nullptr) return false;
  grouped::launch(choice_of(c, call.kernel, target), c.problem, c.x, call.x.device.index, stream);
  return true;
}

std::string explain_grouped_packed_mm(GroupedPackedMmProblem const& problem, Arch arch, int sm_count) {
  Checked const c = checked(problem);
  Target target = nominal(KernelSet::kWeightOnly, arch);
  if (sm_count > 0) target.sm_count = sm_count;
  return described(c, std::nullopt, target);
}

std::string explain(GroupedPackedMm const& call) {
  if (forced_arch() == Arch::kAuto && call.x.device.type == Device::Type::kCpu) {
    Checked const c = checked(call);
    is_for_cpu(call);
    return is_empty(c.problem) ? kEmpty : grouped::describe_on_host(c.problem, c.format, c.x);
  }
  return described(checked(call), call.kernel, target_of("grouped_packed_mm", KernelSet::kWeightOnly, call.x.device));
}

bool has_expert_wgmma(GroupedPackedMmProblem const& problem, Arch arch, int device) {
  Checked const c = checked(problem);
  std::optional<grouped::Format> const format = grouped::format_of(c.problem.product.weight, c.format);
  std::optional<Target> const target =
      device == kNoDevice ? nominal(KernelSet::kWeightOnly, arch) : find_target(KernelSet::kWeightOnly, device);
  constexpr int kManyRows = static_cast<int>(grouped::kExpertRows.size()) - 1;
  return format && target && grouped::has_expert_wgmma(kManyRows, c.problem, c.x, *format, *target);
}

}  // namespace epiloq
