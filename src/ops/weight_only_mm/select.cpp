#include "ops/weight_only_mm/select.h"

#include <algorithm>
#include <sstream>

#include "epiloq/error.h"
#include "ops/weight_only_mm/configs.h"
#include "ops/weight_only_mm/wgmma_layout.h"

namespace epiloq::ops::weight_only_mm {
namespace {

constexpr int kMaxCluster = 8;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
std::int64_t padded(std::int64_t k) { return ceil_div(k, kPadding) * kPadding; }

std::int64_t group_of(WeightOnlyMmProblem const& p) {
  return p.group_size == -1 ? padded(p.k) : std::min(p.group_size, padded(p.k));
}

// Bytes of a step of so many weight rows, with their parameters.
std::int64_t groups_in_step(WeightOnlyMmProblem const& p) { return std::max<std::int64_t>(1, kPadding / group_of(p)); }
std::int64_t step_bytes(WeightOnlyMmProblem const& p, int rows) {
  int const parameter_bytes = p.scale_bytes * (p.offsets ? 2 : 1) + p.zero_bytes;
  return rows * (kPadding * p.bits / 8 + groups_in_step(p) * parameter_bytes);
}

bool fits(StreamConfig const& c, WeightOnlyMmProblem const& p, Target const& t) {
  int const rows = c.slabs_of(p.bits) * kSlab;
  return p.m <= c.tokens && c.warps * c.stages * (step_bytes(p, rows) + p.m * kPadding * 2) <= t.shared_bytes &&
         c.warps * c.tokens * (rows + 4) * 4 <= t.shared_bytes;
}

bool fits(TiledConfig const& c, WeightOnlyMmProblem const& p, Target const& t) {
  return shared_bytes(c, p) <= t.shared_bytes;
}

bool fits(WgmmaConfig const& c, WeightOnlyMmProblem const& p, Target const& t) {
  WgmmaStage const stage(c, p.bits, static_cast<int>(groups_in_step(p)), p.scale_bytes, p.zero_bytes);
  constexpr int kFewest = 2;
  return wgmma_stages(stage, t.shared_bytes) >= kFewest &&
         wgmma_shared_bytes(c, stage, t.shared_bytes) + kBarrierBytes <= t.shared_bytes;
}

// Of the family's table, for this target.
bool is_built(Family family, int row, Target const& t) {
  if (family == Family::kWgmma) return t.has_wgmma;
  std::size_t const rows = family == Family::kStream ? kStreamRows.size() : kTiledRows.size();
  return t.arch != Arch::kSm75 || row + 1 == static_cast<int>(rows);
}

template <class Rows>
bool is_there(Rows const& rows, Family family, int row, WeightOnlyMmProblem const& p, Target const& t) {
  return row >= 0 && row < static_cast<int>(rows.size()) && is_built(family, row, t) && fits(rows[row], p, t);
}

bool is_there(Family family, int row, WeightOnlyMmProblem const& p, Target const& t) {
  switch (family) {
    case Family::kStream:
      return is_there(kStreamRows, family, row, p, t);
    case Family::kTiled:
      return is_there(kTiledRows, family, row, p, t);
    case Family::kWgmma:
      return !p.offsets && is_there(kWgmmaRows, family, row, p, t) && (p.same_type || !kWgmmaRows[row].rounds);
    default:
      return false;
  }
}

// Of the fewest tokens that do, wide blocks read the tokens less often; it takes narrow ones to make some two an SM,
// which memory's pipe wants.
Choice stream_choice(WeightOnlyMmProblem const& p, Target const& t) {
  std::int64_t const slabs = ceil_div(p.n, kSlab), steps = ceil_div(p.k, kPadding);
  int const tokens = p.m <= 8 ? 8 : 16;
  int chosen = -1;
  for (int row = 0; row < static_cast<int>(kStreamRows.size()); ++row) {
    if (!is_there(Family::kStream, row, p, t) || kStreamRows[row].tokens != tokens) continue;
    bool const enough = chosen >= 0 && ceil_div(slabs, kStreamRows[chosen].slabs_of(p.bits)) * 5 >= 8 * t.sm_count;
    bool const narrower = chosen < 0 || kStreamRows[row].slabs_of(p.bits) < kStreamRows[chosen].slabs_of(p.bits);
    if (!enough && narrower) chosen = row;
  }
  if (chosen < 0) return {Family::kDense, 0, 1, "no kernel fits the shared memory"};
  StreamConfig const& config = kStreamRows[chosen];
  std::int64_t const blocks = ceil_div(slabs, config.slabs_of(p.bits));
  return {Family::kStream, chosen,
          blocks >= t.sm_count ? 1 : best_split(blocks, ceil_div(steps, config.warps), 1, 2, t)};
}

// The narrowest tile that takes all tokens, or else the widest; `blocks_of` an SM.
template <class Rows, class Blocks>
Choice choice_by_tokens(Family family, Rows const& rows, WeightOnlyMmProblem const& p, Target const& t,
                        Blocks blocks_of) {
  int chosen = -1;
  for (int row = 0; row < static_cast<int>(rows.size()); ++row) {
    if (!is_there(family, row, p, t)) continue;
    bool const wider = chosen < 0 || rows[row].tokens > rows[chosen].tokens;
    if (chosen < 0 || (wider && rows[chosen].tokens < p.m)) chosen = row;
  }
  if (chosen < 0) return {Family::kDense, 0, 1, "no kernel fits the shared memory"};
  auto const& config = rows[chosen];
  std::int64_t const blocks = ceil_div(p.n, config.rows()) * ceil_div(p.m, config.tokens);
  return {family, chosen, best_split(blocks, ceil_div(p.k, kPadding), 4, blocks_of(config), t)};
}

bool has_kernel(std::int64_t group) {
  std::int64_t const steps = group / kPadding;
  return group == 32 || group == 64 || (group % kPadding == 0 && (steps & (steps - 1)) == 0);
}

// Kernels count a weight's bytes in 32 bits.
bool is_large(WeightOnlyMmProblem const& p) {
  std::int64_t const rows = ceil_div(p.n, kSlab) * kSlab, groups = ceil_div(padded(p.k), group_of(p));
  return std::max(rows * padded(p.k) * p.bits / 8, rows * groups * 4) >= std::int64_t{1} << 32;
}

char const* why_dense(WeightOnlyMmProblem const& p, Target const& t) {
  if (p.dtype == DType::kFloat32) return "float32 activations";
  if (p.bits != 4 && p.bits != 8) return "no kernel reads 2 or 3 bits";
  if (p.k == 0) return "no columns";
  if (group_of(p) != padded(p.k) && !has_kernel(group_of(p))) return "no kernel for this group size";
  if (!p.aligned) return "rows of x off 16 bytes";
  if (t.arch == Arch::kSm75 && p.dtype == DType::kBFloat16) return "no bfloat16 tensor cores";
  if (is_large(p)) return "more than 4 GB of weights";
  return nullptr;
}

}  // namespace

std::int64_t shared_bytes(TiledConfig const& c, WeightOnlyMmProblem const& p) {
  return std::max<std::int64_t>(c.stages(p.bits) * (step_bytes(p, c.rows()) + c.tokens * kPadding * 2),
                                c.tokens * (c.rows() + 4) * 4);
}

int best_split(std::int64_t blocks, std::int64_t steps, int fixed, int blocks_per_sm, Target const& t) {
  if (t.arch != Arch::kSm90) return 1;
  auto const cost = [&](int split) {
    return ceil_div(blocks * split, t.sm_count * blocks_per_sm) * (ceil_div(steps, split) + fixed);
  };
  int best = 1;
  for (int split = 2; split <= kMaxCluster && split <= steps; ++split) {
    if (cost(split) < cost(best)) best = split;
  }
  return best;
}

Choice choose(WeightOnlyMmProblem const& p, Target const& t) {
  if (char const* why = why_dense(p, t)) return {Family::kDense, 0, 1, why};
  if (p.m >= kWgmmaTokens.first && p.m <= kWgmmaTokens.last) {
    Choice const choice = choice_by_tokens(Family::kWgmma, kWgmmaRows, p, t, [](auto const&) { return 1; });
    if (choice.family == Family::kWgmma) return choice;
  }
  if (p.m >= kDenseTokens) return {Family::kDense, 0, 1, "many tokens"};
  if (p.m <= kStreamTokens) return stream_choice(p, t);
  return choice_by_tokens(Family::kTiled, kTiledRows, p, t, [](auto const& config) { return config.blocks; });
}

Choice choose(WeightOnlyMmProblem const& p, Target const& t, WeightOnlyMmKernel const& kernel) {
  char const* why = why_dense(p, t);
  if (why == nullptr && !is_there(kernel.family, kernel.row, p, t)) {
    why =
        "no such row, not built for this architecture, not made for so many tokens or for offsets, or too large for "
        "its shared memory";
  }
  if (kernel.split < 1 || kernel.split > kMaxCluster || (kernel.split > 1 && t.arch != Arch::kSm90) ||
      kernel.split > ceil_div(p.k, kPadding)) {
    why = "no such split";
  }
  if (why != nullptr)
    throw InvalidArgument(
        std::string("epiloq.weight_only_mm: kernel: expected one that fits, got one that does not: ") + why);
  return {kernel.family, kernel.row, kernel.split};
}

std::string describe(Choice const& choice) {
  std::ostringstream text;
  if (choice.family == Family::kDense) {
    text << "de-quantise, then a dense product (" << choice.why << ')';
  } else if (choice.family == Family::kStream) {
    StreamConfig const& c = kStreamRows[choice.row];
    text << "stream " << c.slabs << " slabs of 16 weight rows, " << c.tokens << " tokens, " << c.warps
         << " warps along K, stages " << c.stages;
  } else if (choice.family == Family::kWgmma) {
    WgmmaConfig const& c = kWgmmaRows[choice.row];
    text << "wgmma " << c.rows() << " weight rows x " << c.tokens << " tokens, " << c.teams << " warpgroups"
         << (c.rounds ? ", weights rounded with their scales" : "");
  } else {
    TiledConfig const& c = kTiledRows[choice.row];
    text << "mma.sync " << c.rows() << " weight rows x " << c.tokens << " tokens, " << c.warps << " warps, stages "
         << c.stages4;
  }
  if (choice.split > 1) text << ", K over clusters of " << choice.split;
  return text.str();
}

Target nominal(Arch arch) { return epiloq::nominal(arch, {Arch::kSm75, Arch::kSm80, Arch::kSm90}); }

}  // namespace epiloq::ops::weight_only_mm
