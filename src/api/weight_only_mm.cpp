#include "epiloq/weight_only_mm.h"

#include "api/checks/packed_weight.h"
#include "core/checks.h"
#include "dispatch/arch.h"
#include "dispatch/choice_cache.h"
#include "dispatch/weight_only_mm/cost/parameters.h"
#include "dispatch/weight_only_mm/launch.h"
#include "dispatch/weight_only_mm/select.h"
#include "epiloq/batch_invariant.h"
#include "epiloq/device.h"
#include "problems/weight_only.h"

namespace epiloq {
namespace {

namespace wo = ops::weight_only_mm;

wo::Problem checked(WeightOnlyMm const& call) {
  Checker const check("weight_only_mm", call.x.device);
  check.tensor("x", call.x, kFloats);
  wo::Weight const weight = wo::checked_weight(check, call.weight);
  auto const [x, out] = check.product(call.x, call.out, call.bias, weight.n, weight.k);
  if (x.rows > wo::kMaxSize) check.fail("x", "expected at most ", wo::kMaxSize, " rows, got ", x.rows);
  check.clamp(call.lo, call.hi);
  wo::check_apart(check, call.out, call.weight);
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
  check.tensor("out", call.out, {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat8E4M3, DType::kInt8});
  wo::Weight const weight = wo::checked_weight(check, call.weight);
  if (size_of(call.out.dtype) == 1) {
    bool const fits = weight.bits <= 4 || (call.out.dtype == DType::kInt8 && weight.zero == nullptr);
    if (weight.offset != nullptr) check.fail("out", "expected a floating-point type for a weight with offsets");
    if (!fits) check.fail("out", "cannot hold the integers of this weight of ", weight.bits, " bits exactly");
  }
  check.shape("out", call.out, {weight.n, weight.k});
  if (call.out.device.type == Device::Type::kCuda) check.aligned16("out", call.out);
  wo::check_apart(check, call.out, call.weight);
  return {weight, call.out.data, call.out.dtype};
}

WeightOnlyMmProblem problem_of(wo::Problem const& p, WeightOnlyMm const& call) {
  bool const aligned = is_aligned(p.x) && (p.m == 1 || p.stride_x % 8 == 0);
  return {.m = p.m,
          .n = p.weight.n,
          .k = p.weight.k,
          .bits = p.weight.bits,
          .group_size = call.weight.group_size,
          .dtype = call.x.dtype,
          .aligned = aligned,
          .scale_bytes = static_cast<int>(size_of(p.weight.scale_dtype)),
          .zero_bytes = p.weight.zero != nullptr ? 1 : 0,
          .offsets = p.weight.offset != nullptr,
          .same_type = p.weight.scale_dtype == call.x.dtype,
          .batch_invariant = batch_invariant()};
}

Target target_of(WeightOnlyMm const& call) {
  return target_of("weight_only_mm", KernelSet::kWeightOnly, call.x.device);
}

wo::Choice choice_of(wo::Problem const& problem, WeightOnlyMm const& call) {
  WeightOnlyMmProblem const p = problem_of(problem, call);
  if (call.kernel) return wo::choose(p, target_of(call), *call.kernel);
  return tuning::choose<wo::Selection>(p, target_of(call), tuning::index_of(call.x.device)).choice;
}

wo::Choice cached_choice(wo::Problem const& problem, WeightOnlyMm const& call) {
  auto const choose = [&] { return choice_of(problem, call); };
  return call.kernel ? choose() : gemm::cached_choice(problem_of(problem, call), call.x.device.index, choose);
}

bool is_empty(wo::Problem const& p) { return p.m == 0 || p.weight.n == 0; }

}  // namespace

void check(WeightOnlyMm const& call) { checked(call); }
void check(DequantizeWeight const& call) { checked(call); }

bool weight_only_mm(WeightOnlyMm const& call, Stream stream) {
  wo::Problem const problem = checked(call);
  if (is_empty(problem)) return true;
  if (call.x.device.type == Device::Type::kCpu) {
    wo::multiply_on_host(problem, call.x.dtype, call.threads);
    return true;
  }
  wo::Choice const choice = cached_choice(problem, call);
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

#if !EPILOQ_HAS_CUDA
void ops::weight_only_mm::launch_dequantize(DequantizeProblem const&, int device, Stream) { device_properties(device); }
#endif

std::string explain_weight_only_mm(WeightOnlyMmProblem const& requested, Arch arch, int sm_count, int memory_gb_s,
                                   bool terms) {
  WeightOnlyMmProblem const problem = tuning::as_set(requested);
  Checker const check("weight_only_mm", {});
  wo::check_format(check, problem.bits, problem.group_size);
  if (problem.m < 0 || problem.n < 0 || problem.k < 0) {
    check.fail("problem", "expected sizes of at least 0, got ", problem.m, ", ", problem.n, " and ", problem.k);
  }
  if (problem.m == 0 || problem.n == 0) return "nothing to launch: the output is empty";
  Target target = nominal(KernelSet::kWeightOnly, arch);
  if (sm_count > 0) target.sm_count = sm_count;
  if (memory_gb_s > 0) target.memory_gb_s = memory_gb_s;
  wo::Choice const choice = wo::Selection::choose(problem, target);
  return terms ? wo::explain_terms(problem, target, {choice}) : wo::describe(choice);
}

std::string explain(WeightOnlyMm const& call, bool terms) {
  wo::Problem const problem = checked(call);
  if (is_empty(problem)) return "nothing to launch: the output is empty";
  if (call.x.device.type == Device::Type::kCpu && forced_arch() == Arch::kAuto) {
    return wo::describe_on_host(problem, call.x.dtype);
  }
  if (call.kernel) return wo::describe(choice_of(problem, call));
  WeightOnlyMmProblem const p = problem_of(problem, call);
  Target const target = target_of(call);
  int const device = tuning::index_of(call.x.device);
  if (!terms) return tuning::explain<wo::Selection>(p, target, device);
  return wo::explain_terms(p, target, tuning::choose<wo::Selection>(p, target, device));
}

KernelCandidates candidates(WeightOnlyMmProblem const& problem, int device) {
  wo::check_format(Checker("weight_only_mm", {}), problem.bits, problem.group_size);
  return tuning::candidates<wo::Selection>(tuning::as_set(problem),
                                           target_of_index("weight_only_mm", KernelSet::kWeightOnly, device));
}

std::vector<std::pair<std::string, double>> weight_only_mm_costs() { return wo::parameters_of(wo::kSm90Costs); }

std::vector<std::pair<WeightOnlyMmKernel, double>> expected_weight_only_mm(WeightOnlyMmProblem const& problem,
                                                                           int memory_gb_s,
                                                                           std::vector<double> const& costs) {
  wo::check_format(Checker("weight_only_mm", {}), problem.bits, problem.group_size);
  Target target = nominal(KernelSet::kWeightOnly, Arch::kSm90);
  target.memory_gb_s = memory_gb_s;
  std::vector<std::pair<WeightOnlyMmKernel, double>> all;
  for (auto const& [choice, us] : wo::timed_candidates(problem, target, wo::with_parameters(costs))) {
    all.push_back({{choice.family, choice.row, choice.split}, us});
  }
  return all;
}

}  // namespace epiloq
