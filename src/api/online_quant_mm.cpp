#include "epiloq/online_quant_mm.h"

#include "core/checks.h"
#include "dispatch/arch.h"
#include "dispatch/choice_cache.h"
#include "dispatch/online_quant_mm/launch.h"
#include "dispatch/online_quant_mm/select.h"
#include "epiloq/batch_invariant.h"
#include "epiloq/device.h"

namespace epiloq {
namespace {

namespace online = ops::online_quant_mm;

constexpr char const* kNothing = "nothing to launch: the output is empty";
constexpr std::int64_t kMaxRows = (std::int64_t{1} << 31) - 1;
constexpr std::int64_t kMaxColumns = 65535 * 16;   // grid limit with the smallest tile
constexpr std::int64_t kMaxGroup = (1 << 17) - 1;  // sums of this many products fit int32
constexpr std::int64_t kMaxFeatures = std::int64_t{1} << 30;

using ops::quantize_blockwise_int8::kTf32Parts;

std::int64_t padded_k(std::int64_t k) { return round_up(k, online::kStep); }
std::int64_t padded_blocks(std::int64_t k, std::int64_t group) {
  return round_up(online::kStep % group == 0 ? padded_k(k) : k, group) / group;
}

struct Sizes {
  Matrix x, out;
  std::int64_t n;
};

void shaped(Checker const& check, char const* name, TensorView const& view, DType dtype,
            std::initializer_list<std::int64_t> shape) {
  check.tensor(name, view, {dtype});
  check.shape(name, view, shape);
  check.aligned16(name, view);
}

void check_format(Checker const& check, int bits, std::int64_t group) {
  if (group < 1 || group > kMaxGroup) check.fail("group_size", "expected 1 to ", kMaxGroup, ", got ", group);
  if (bits != 4 && bits != 8) check.fail("bits", "expected 4 or 8, got ", bits);
}

void check_weight(OnlineQuantMm const& call, Checker const& check, std::int64_t n) {
  std::int64_t const k = call.in_features, group = call.group_size;
  check_format(check, call.bits, group);
  if (k < 1 || k > kMaxFeatures) check.fail("in_features", "expected 1 to ", kMaxFeatures, ", got ", k);
  if (n > kMaxColumns) check.fail("w_q", "expected at most ", kMaxColumns, " rows, got ", n);
  shaped(check, "w_q", call.values, DType::kInt8, {n, padded_k(k) * call.bits / 8});
  std::int64_t const kinds = call.parameters.rank == 3 && call.parameters.size(1) == 3 ? 3 : 2;
  shaped(check, "w_scale", call.parameters, DType::kFloat32, {padded_blocks(k, group), kinds, round_up(n, 4)});
}

Sizes checked(OnlineQuantMm const& call) {
  Checker const check("online_quant_mm", call.x.device);
  check.tensor("x", call.x, kFloats);
  check.tensor("out", call.out, {call.x.dtype});
  std::int64_t const n = call.values.rank < 1 ? 0 : call.values.shape[0];
  Sizes const sizes{check.rows("x", call.x), check.rows_like("out", call.out, "x", call.x, n), n};
  if (sizes.x.cols != call.in_features) {
    check.fail("x", "expected […, ", call.in_features, "] to suit the weight, got ", describe(call.x));
  }
  check_weight(call, check, sizes.n);
  if (sizes.x.rows > kMaxRows) check.fail("x", "expected at most ", kMaxRows, " rows, got ", sizes.x.rows);
  check.bias(call.bias, call.out, sizes.n);
  check.clamp(call.lo, call.hi);
  check.apart("out", call.out, "x", call.x);
  check.apart("out", call.out, "w_q", call.values);
  check.apart("out", call.out, "w_scale", call.parameters);
  return sizes;
}

void check_workspace(OnlineQuantMm const& call, OnlineQuantWorkspace const& workspace, Sizes const& sizes) {
  Checker const check("online_quant_mm", call.x.device);
  std::int64_t const m = sizes.x.rows, k = call.in_features;
  shaped(check, "x_values", workspace.values, DType::kInt8, {m, padded_k(k)});
  shaped(check, "x_parameters", workspace.parameters, DType::kFloat32,
         {padded_blocks(k, call.group_size), 3, kTf32Parts * round_up(m, 4)});
  if (!call.staged) return;
  if (call.bits != 8) check.fail("bits", "expected weights widened to 8 for the staged pipeline, got ", call.bits);
  if (!workspace.products || !workspace.sums) check.fail("products", "expected a workspace for the staged pipeline");
  shaped(check, "products", *workspace.products, DType::kInt32, {m, sizes.n});
  shaped(check, "sums", *workspace.sums, DType::kFloat32, {m, sizes.n});
}

OnlineQuantProblem problem_of(OnlineQuantMm const& call, Sizes const& sizes) {
  return {sizes.x.rows, sizes.n, call.in_features, call.group_size, call.bits, batch_invariant()};
}

Target target_of(OnlineQuantMm const& call) {
  return target_of("online_quant_mm", KernelSet::kOnlineQuant, call.x.device);
}

online::Choice choose(OnlineQuantMm const& call, Sizes const& sizes) {
  if (call.staged) return {online::Family::kStaged, 0};
  OnlineQuantProblem const problem = problem_of(call, sizes);
  if (call.kernel) return online::choose(problem, target_of(call), *call.kernel);
  return tuning::choose<online::Selection>(problem, target_of(call), tuning::index_of(call.x.device)).choice;
}

online::Choice cached_choice(OnlineQuantMm const& call, Sizes const& sizes) {
  auto const chosen = [&] { return choose(call, sizes); };
  if (call.staged || call.kernel) return chosen();
  return gemm::cached_choice(problem_of(call, sizes), call.x.device.index, chosen);
}

// The call's operands, without a workspace.
online::Work work_of(OnlineQuantMm const& call, Sizes const& sizes) {
  online::Work work{};
  work.quantise.rows = static_cast<int>(sizes.x.rows);
  work.quantise.cols = static_cast<int>(call.in_features);
  work.quantise.padded_cols = static_cast<int>(padded_k(call.in_features));
  work.quantise.group = static_cast<int>(call.group_size);
  work.quantise.stride_x = sizes.x.stride;
  work.quantise.x = call.x.data;
  gemm::OnlineQuantGemmProblem& p = work.gemm;
  p.m = work.quantise.rows;
  p.n = static_cast<int>(sizes.n);
  p.k = work.quantise.padded_cols;
  p.padded_m = static_cast<int>(round_up(sizes.x.rows, 4));
  work.quantise.parameter_rows = p.padded_m;  // kernels load parameters four rows at a time
  p.padded_n = static_cast<int>(round_up(sizes.n, 4));
  p.kinds = static_cast<int>(call.parameters.size(1));
  p.b = call.values.as<std::int8_t>();
  p.b_parameters = call.parameters.as<float>();
  p.bias = call.bias ? call.bias->data : nullptr;
  p.out = call.out.data;
  p.stride_out = sizes.out.stride;
  p.dtype = call.x.dtype;
  p.lo = call.lo;
  p.hi = call.hi;
  return work;
}

void set_workspace(OnlineQuantWorkspace const& workspace, bool staged, online::Choice const& choice,
                   online::Work& work) {
  bool const in_parts = choice.family == online::Family::kSm90;
  std::int64_t const each = in_parts ? kTf32Parts : 1, line = each * work.gemm.padded_m;
  work.quantise.stride_q = work.quantise.padded_cols;
  work.quantise.row_stride = each;
  work.quantise.block_stride = 3 * line;
  work.quantise.in_tf32_parts = in_parts;
  work.quantise.q = workspace.values.as<std::int8_t>();
  work.quantise.scale = workspace.parameters.as<float>();
  work.quantise.offset = work.quantise.scale + line;
  // Only weights with offsets need the sums.
  work.quantise.scaled_sum = work.gemm.kinds == 3 ? work.quantise.offset + line : nullptr;
  work.gemm.a = work.quantise.q;
  work.gemm.a_parameters = work.quantise.scale;
  work.gemm.split = choice.split;
  work.gemm.whole = choice.whole;
  if (!staged) return;
  work.products = workspace.products->as<std::int32_t>();
  work.sums = workspace.sums->as<float>();
}

}  // namespace

void check(OnlineQuantMm const& call) { checked(call); }

bool needs_staging(std::int64_t group_size) { return !online::has_fused_kernel(group_size); }

void online_quant_mm(OnlineQuantMm const& call, OnlineQuantWorkspace const& workspace, Stream stream) {
  Sizes const sizes = checked(call);
  expect_device("online_quant_mm", "x", call.x, Device::Type::kCuda);
  check_workspace(call, workspace, sizes);
  if (sizes.x.rows == 0 || sizes.n == 0) return;
  online::Choice const choice = cached_choice(call, sizes);
  if (choice.family == online::Family::kStaged && !call.staged) {
    throw Unsupported("epiloq.online_quant_mm: group_size: no fused kernel supports this size, and staged is false");
  }
  online::Work work = work_of(call, sizes);
  set_workspace(workspace, call.staged, choice, work);
  online::launch(choice, problem_of(call, sizes), work, call.x.device.index, stream);
}

void online_quant_mm(OnlineQuantMm const& call) {
  Sizes const sizes = checked(call);
  expect_device("online_quant_mm", "x", call.x, Device::Type::kCpu);
  if (sizes.x.rows == 0 || sizes.n == 0) return;
  online::run_on_host(problem_of(call, sizes), work_of(call, sizes), call.threads);
}

std::string explain_online_quant_mm(OnlineQuantProblem const& requested, Arch arch, int sm_count, int memory_gb_s,
                                    bool terms) {
  OnlineQuantProblem const problem = tuning::as_set(requested);
  check_format(Checker("online_quant_mm", {}), problem.bits, problem.group_size);
  Target target = nominal(KernelSet::kOnlineQuant, arch);
  if (sm_count > 0) target.sm_count = sm_count;
  if (memory_gb_s > 0) target.memory_gb_s = memory_gb_s;
  if (problem.m == 0 || problem.n == 0) return kNothing;
  online::Choice const choice = online::Selection::choose(problem, target);
  return terms ? tuning::explain_terms<online::Selection>(problem, target, {choice})
               : online::describe(choice, problem);
}

std::string explain(OnlineQuantMm const& call, bool terms) {
  Sizes const sizes = checked(call);
  if (sizes.x.rows == 0 || sizes.n == 0) return kNothing;
  if (call.x.device.type == Device::Type::kCpu && forced_arch() == Arch::kAuto) {
    return online::describe_on_host(problem_of(call, sizes));
  }
  if (call.staged || call.kernel) return online::describe(choose(call, sizes), problem_of(call, sizes));
  return tuning::explain<online::Selection>(problem_of(call, sizes), target_of(call), tuning::index_of(call.x.device),
                                            terms);
}

KernelCandidates candidates(OnlineQuantProblem const& problem, int device) {
  check_format(Checker("online_quant_mm", {}), problem.bits, problem.group_size);
  return tuning::candidates<online::Selection>(tuning::as_set(problem),
                                               target_of_index("online_quant_mm", KernelSet::kOnlineQuant, device));
}

}  // namespace epiloq
