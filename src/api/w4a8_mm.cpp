#include "epiloq/w4a8_mm.h"

#include "api/checks/packed_weight.h"
#include "core/checks.h"
#include "dispatch/arch.h"
#include "dispatch/choice_cache.h"
#include "dispatch/w4a8_mm/launch.h"
#include "dispatch/w4a8_mm/select.h"
#include "epiloq/batch_invariant.h"
#include "epiloq/device.h"
#include "problems/w4a8_mm.h"

namespace epiloq {
namespace {

namespace wo = ops::weight_only_mm;
using ops::w4a8_mm::Choice;
using ops::w4a8_mm::Problem;

Problem checked(W4a8Mm const& call) {
  Checker const check("w4a8_mm", call.x_q.device);
  check.tensor("x_q", call.x_q, {DType::kFloat8E4M3});
  wo::Weight const weight = wo::checked_weight(check, call.weight);
  if (weight.bits != 4) check.fail("weight", "expected 4 bits, got ", weight.bits);
  Matrix const x = check.rows("x_q", call.x_q);
  if (x.cols != weight.k) check.fail("x_q", "expected ", weight.k, " columns, got ", describe(call.x_q));
  if (x.rows > wo::kMaxSize) check.fail("x_q", "expected at most ", wo::kMaxSize, " rows, got ", x.rows);
  check.tensor("scale_a", call.scale_a, {DType::kFloat32});
  check.scalar_or_rows("scale_a", call.scale_a, "x_q", call.x_q);
  check.tensor("out", call.out, {DType::kFloat16, DType::kBFloat16});
  Matrix const out = check.rows("out", call.out);
  if (out.rows != x.rows || out.cols != weight.n) {
    check.fail("out", "expected ", x.rows, " rows of ", weight.n, " columns, got ", describe(call.out));
  }
  check.tensor("scratch", call.scratch, {DType::kUInt8});
  check.shape("scratch", call.scratch, {x.rows, weight.padded_k});
  check.aligned16("scratch", call.scratch);
  check.bias(call.bias, call.out, weight.n);
  check.apart("out", call.out, "x_q", call.x_q);
  check.apart("scratch", call.scratch, "x_q", call.x_q);
  check.apart("scratch", call.scratch, "out", call.out);
  wo::check_apart(check, call.out, call.weight);
  constexpr float kInfinity = __builtin_inff();
  return {{weight, static_cast<int>(x.rows), weight.padded_k, out.stride, call.scratch.data, call.out.data,
           call.bias ? call.bias->data : nullptr, -kInfinity, kInfinity},
          static_cast<float const*>(call.scale_a.data),
          call.scale_a.numel() > 1 ? 1 : 0,
          static_cast<std::uint8_t const*>(call.x_q.data),
          x.stride};
}

W4a8Problem problem_of(Problem const& p, W4a8Mm const& call) {
  return {p.product.m, p.product.weight.n, p.product.weight.k, call.weight.group_size, batch_invariant()};
}

// Why there is no kernel; null if there is.
char const* unsupported_reason(Problem const& p, std::optional<Target> const& target) {
  wo::Weight const& w = p.product.weight;
  if (!target || !target->has_wgmma) return "a device without wgmma";
  if (w.zero != nullptr || w.offset != nullptr) return "zero points";
  bool const power = w.group == wo::kPadding << w.group_shift || w.group == w.padded_k;
  if (w.group != 32 && w.group != 64 && !power) return "this group size";
  return nullptr;
}

std::optional<Target> target_of(W4a8Mm const& call) {
  if (call.x_q.device.type != Device::Type::kCuda) return std::nullopt;
  return find_target(KernelSet::kWeightOnly, call.x_q.device.index);
}

}  // namespace

void check(W4a8Mm const& call) { checked(call); }

bool w4a8_mm(W4a8Mm const& call, Stream stream) {
  Problem const problem = checked(call);
  auto const& product = problem.product;
  std::optional<Target> const target = target_of(call);
  if (unsupported_reason(problem, target) != nullptr || product.weight.k == 0) return false;
  if (product.m == 0 || product.weight.n == 0) return true;
  int const device = call.x_q.device.index;
  Choice const choice = gemm::cached_choice(problem_of(problem, call), device, [&] {
    return tuning::choose<ops::w4a8_mm::Selection>(problem_of(problem, call), *target, device).choice;
  });
  ops::w4a8_mm::launch(choice, problem, call.out.dtype, device, stream);
  return true;
}

void widen_tokens(WidenTokens const& call, Stream stream) {
  Checker const check("widen_tokens", call.x_q.device);
  check.tensor("x_q", call.x_q, {DType::kInt8, DType::kFloat8E4M3});
  check.tensor("out", call.out, {DType::kBFloat16});
  check.tensor("scale_a", call.scale_a, {DType::kFloat32});
  Matrix const x = check.rows("x_q", call.x_q), out = check.rows("out", call.out);
  if (out.rows != x.rows || out.cols != x.cols) {
    check.fail("out", "expected the shape of ", describe(call.x_q), ", got ", describe(call.out));
  }
  if (x.rows > wo::kMaxSize || x.cols > wo::kMaxSize) {
    check.fail("x_q", "expected at most ", wo::kMaxSize, " rows and columns, got ", describe(call.x_q));
  }
  check.scalar_or_rows("scale_a", call.scale_a, "x_q", call.x_q);
  check.apart("out", call.out, "x_q", call.x_q);
  check.apart("out", call.out, "scale_a", call.scale_a);
  expect_device("widen_tokens", "x_q", call.x_q, Device::Type::kCuda);
  if (x.rows == 0 || x.cols == 0) return;
  auto const starts = [](void const* data, std::int64_t bytes) { return is_aligned(data) && bytes % 16 == 0; };
  bool const aligned = starts(call.x_q.data, x.stride) && starts(call.out.data, 2 * out.stride);
  ops::w4a8_mm::launch_widen(
      {call.x_q.as<std::uint8_t>(), call.scale_a.as<float>(), call.out.data, x.stride, out.stride,
       static_cast<int>(x.rows), static_cast<int>(x.cols), call.scale_a.numel() > 1 ? 1 : 0, aligned},
      call.x_q.dtype, call.x_q.device.index, stream);
}

#if !EPILOQ_HAS_CUDA
void ops::w4a8_mm::launch_widen(WidenProblem const&, DType, int device, Stream) { device_properties(device); }
#endif

std::string explain_w4a8_mm(W4a8Problem const& problem, Arch arch, int sm_count, bool terms) {
  std::int64_t const group = problem.group_size, steps = group / wo::kPadding;
  bool const is_power = steps > 0 && group % wo::kPadding == 0 && (steps & (steps - 1)) == 0;
  if (group != -1 && group != 32 && group != 64 && !is_power) {
    Checker("w4a8_mm", {}).fail("group_size", "expected -1, 32, 64 or a power of two times 128, got ", group);
  }
  Target target = nominal(KernelSet::kWeightOnly, arch);
  if (!target.has_wgmma) {
    throw Unsupported("epiloq.w4a8_mm: arch: expected sm90, which alone has a kernel, got " + name(arch) +
                      "; other cards run weight_only_mm's, with converted activations");
  }
  if (sm_count > 0) target.sm_count = sm_count;
  if (problem.m == 0 || problem.n == 0 || problem.k == 0) return "nothing to launch: no product";
  Choice const choice = ops::w4a8_mm::Selection::choose(problem, target);
  if (!terms) return ops::w4a8_mm::describe(choice);
  return tuning::explain_terms<ops::w4a8_mm::Selection>(problem, target, {choice});
}

std::string explain(W4a8Mm const& call, bool terms) {
  Problem const problem = checked(call);
  std::optional<Target> const target = target_of(call);
  if (char const* const why = unsupported_reason(problem, target)) return std::string("no float8 kernel for ") + why;
  return tuning::explain<ops::w4a8_mm::Selection>(problem_of(problem, call), *target, tuning::index_of(call.x_q.device),
                                                  terms);
}

KernelCandidates candidates(W4a8Problem const& problem, int device) {
  return tuning::candidates<ops::w4a8_mm::Selection>(problem,
                                                     target_of_index("w4a8_mm", KernelSet::kWeightOnly, device));
}

}  // namespace epiloq
