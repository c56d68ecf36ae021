#include "ops/weight_only_mm/select.h"

#include <algorithm>
#include <sstream>

#include "epiloq/error.h"
#include "ops/weight_only_mm/configs.h"
#include "ops/weight_only_mm/layout.h"

namespace epiloq::ops::weight_only_mm {
namespace {

constexpr int kMaxCluster = 8;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// The clusters' blocks that share K, so that the busiest SM is done soonest: its blocks, one after the other, each
// its steps of K and `fixed` steps' worth of time to begin and to end.
int best_split(std::int64_t blocks, std::int64_t steps, int fixed, Target const& t) {
  if (t.arch != Arch::kSm90) return 1;
  auto const cost = [&](int split) {
    return ceil_div(blocks * split, t.sm_count) * (ceil_div(steps, split) + fixed);
  };
  int best = 1;
  for (int split = 2; split <= kMaxCluster && split <= steps; ++split) {
    if (cost(split) < cost(best)) best = split;
  }
  return best;
}

// Wide slabs read the tokens less often; narrow ones make enough blocks to ask for all of memory's bandwidth.
Choice stream_choice(WeightOnlyMmProblem const& p, Target const& t) {
  std::int64_t const slabs = ceil_div(p.n, kSlab), steps = ceil_div(p.k, kPadding);
  int row = static_cast<int>(kStreamRows.size()) - 1;
  for (int i = row; i >= 0; --i) {
    if (ceil_div(slabs, kStreamRows[i].slabs) * 4 >= 3 * t.sm_count) row = i;
  }
  StreamConfig const& config = kStreamRows[row];
  std::int64_t const blocks = ceil_div(slabs, config.slabs);
  int const split = blocks >= t.sm_count ? 1 : best_split(blocks, ceil_div(steps, config.warps), 1, t);
  return {Family::kStream, row, split};
}

Choice tiled_choice(WeightOnlyMmProblem const& p, Target const& t) {
  int row = 0;
  while (row + 1 < static_cast<int>(kTiledRows.size()) && kTiledRows[row].tokens < p.m) ++row;
  TiledConfig const& config = kTiledRows[row];
  std::int64_t const blocks = ceil_div(p.n, 32 * config.row_warps) * ceil_div(p.m, config.tokens);
  return {Family::kTiled, row, best_split(blocks, ceil_div(p.k, kPadding), 4, t)};
}

std::int64_t whole_row(WeightOnlyMmProblem const& p) { return ceil_div(p.k, kPadding) * kPadding; }

char const* why_dense(WeightOnlyMmProblem const& p, Target const& t) {
  std::int64_t const group = p.group_size == -1 ? whole_row(p) : std::min(p.group_size, whole_row(p));
  if (p.dtype == DType::kFloat32) return "float32 activations";
  if (p.bits != 4 && p.bits != 8) return "no kernel reads 2 or 3 bits";
  if (group != 32 && group != 64 && group % kPadding != 0) return "no kernel for this group size";
  if (p.k == 0) return "no columns";
  if (!p.aligned) return "rows of x off 16 bytes";
  if (t.arch == Arch::kSm75 && p.dtype == DType::kBFloat16) return "no bfloat16 tensor cores";
  if (p.m >= kDenseTokens) return "many tokens";
  return nullptr;
}

}  // namespace

Choice choose(WeightOnlyMmProblem const& p, Target const& t) {
  if (char const* why = why_dense(p, t)) return {Family::kDense, 0, 1, why};
  return p.m <= kStreamTokens ? stream_choice(p, t) : tiled_choice(p, t);
}

std::string describe(Choice const& choice) {
  std::ostringstream text;
  if (choice.family == Family::kDense) {
    text << "de-quantise, then a dense product (" << choice.why << ')';
  } else if (choice.family == Family::kStream) {
    StreamConfig const& c = kStreamRows[choice.row];
    text << "stream " << c.slabs << " slabs of 16 weight rows, " << kStreamTokens << " tokens, " << c.warps
         << " warps along K, stages " << c.stages;
  } else {
    TiledConfig const& c = kTiledRows[choice.row];
    text << "mma.sync " << 32 * c.row_warps << " weight rows x " << c.tokens << " tokens, " << c.row_warps << 'x'
         << c.k_warps << " warps, stages " << c.stages;
  }
  if (choice.split > 1) text << ", K over clusters of " << choice.split;
  return text.str();
}

Target nominal(Arch arch) {
  // T4, A100, H100
  constexpr Target kTargets[] = {{Arch::kSm75, 40, 65536}, {Arch::kSm80, 108, 166912}, {Arch::kSm90, 132, 232448}};
  for (Target const& target : kTargets) {
    if (target.arch == arch) return target;
  }
  throw InvalidArgument("epiloq.explain: arch: expected sm75, sm80 or sm90, got " + name(arch));
}

}  // namespace epiloq::ops::weight_only_mm
