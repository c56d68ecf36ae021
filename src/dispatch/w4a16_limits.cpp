#include "dispatch/w4a16_limits.h"

#include <algorithm>

#include "core/ceil_div.h"
#include "kernels/common/w4a16/sizes.h"
#include "kernels/sm90/w4a16/w4a16_stage_layout.h"

namespace epiloq::ops::weight_only_mm {
namespace {

bool has_kernel(std::int64_t group, int bits) {
  std::int64_t const steps = group / kPadding;
  return (group == 16 && bits < 4) || group == 32 || group == 64 ||
         (group % kPadding == 0 && (steps & (steps - 1)) == 0);
}

// Kernels use 32-bit byte offsets into a weight.
bool is_large(WeightOnlyMmProblem const& p) {
  std::int64_t const rows = ceil_div(p.n, kPanelRows) * kPanelRows, groups = ceil_div(padded(p.k), group_of(p));
  return std::max(rows * padded(p.k) * p.bits / 8, rows * groups * 4) >= std::int64_t{1} << 32;
}

// A stage for each K group, and at least two.
template <class Config>
bool stages_fit(Config const& c, WeightOnlyMmProblem const& p, Target const& t) {
  TileStage const stage(c, p.bits, static_cast<int>(groups_in_step(p)), p.scale_bytes, p.zero_bytes);
  return stage_count(c, stage, t.shared_bytes) >= kFewestStages &&
         pipeline_shared_bytes(c, stage, t.shared_bytes) + barrier_bytes(most_stages(c)) <= t.shared_bytes;
}

}  // namespace

bool fits(TiledConfig const& c, WeightOnlyMmProblem const& p, Target const& t) {
  return shared_bytes(c, p) <= t.shared_bytes;
}
bool fits(DecodeConfig const& c, WeightOnlyMmProblem const& p, Target const& t) {
  return p.m <= c.tokens && stages_fit(c, p, t);
}
bool fits(WgmmaConfig const& c, WeightOnlyMmProblem const& p, Target const& t) { return stages_fit(c, p, t); }

std::int64_t shared_bytes(TiledConfig const& c, WeightOnlyMmProblem const& p) {
  return std::max<std::int64_t>(
      c.stages(p.bits) * (c.warps * stage_bytes(p, c.rows() / c.warps) + c.tokens * kPadding * 2),
      sum_bytes(c.rows(), c.tokens));
}

char const* why_dense(WeightOnlyMmProblem const& p, Target const& t) {
  if (p.dtype == DType::kFloat32) return "float32 activations";
  if (p.k == 0) return "no columns";
  if (group_of(p) != padded(p.k) && !has_kernel(group_of(p), p.bits)) return "no kernel for this group size";
  if (!p.aligned) return "rows of x off 16 bytes";
  if (t.arch == Arch::kSm75 && p.dtype == DType::kBFloat16) return "no bfloat16 tensor cores";
  if (is_large(p)) return "more than 4 GB of weights";
  return nullptr;
}

int best_split(std::int64_t blocks, std::int64_t steps, int blocks_per_sm, Target const& t) {
  constexpr int kOverheadSteps = 4;  // of a CTA, in K steps
  auto const cost = [&](int split) {
    std::int64_t const at_once = blocks_per_sm * clusters_at_once(split, 1, t);
    return ceil_div(blocks, at_once) * (ceil_div(steps, split) + kOverheadSteps);
  };
  int best = 1;
  for (int split = 2; split <= most_split(steps, t); ++split) {
    if (cost(split) < cost(best)) best = split;
  }
  return best;
}

}  // namespace epiloq::ops::weight_only_mm
