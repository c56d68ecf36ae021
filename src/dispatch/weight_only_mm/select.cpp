#include "dispatch/weight_only_mm/select.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

#include "dispatch/weight_only_mm/costs.h"
#include "dispatch/weight_only_mm/gemv_cost.h"
#include "dispatch/weight_only_mm/tables.h"
#include "epiloq/error.h"
#include "kernels/common/w4a16/sizes.h"
#include "kernels/sm90/w4a16/w4a16_stage_layout.h"

namespace epiloq::ops::weight_only_mm {
namespace {

bool fits(GemvConfig const& c, WeightOnlyMmProblem const& p, Target const& t) {
  return p.m <= c.tokens() && gemv_bytes(c, p, 1) <= t.shared_bytes;
}

template <class Config>
std::int64_t tiles_of(Config const& c, WeightOnlyMmProblem const& p) {
  return ceil_div(p.n, c.rows()) * ceil_div(p.m, c.tokens);
}

// Whether `split` CTAs may split K; tiles always have room for the sums.
bool may_share(GemvConfig const& c, WeightOnlyMmProblem const& p, int split, Target const& t) {
  return gemv_bytes(c, p, split) <= t.shared_bytes;
}
template <class Config>
bool may_share(Config const&, WeightOnlyMmProblem const&, int, Target const&) {
  return true;
}

bool fits(TiledConfig const& c, WeightOnlyMmProblem const& p, Target const& t) {
  return shared_bytes(c, p) <= t.shared_bytes;
}

// A stage for each K group, and at least two.
template <class Config>
bool ring_fits(Config const& c, WeightOnlyMmProblem const& p, Target const& t) {
  TileStage const stage(c, p.bits, static_cast<int>(groups_in_step(p)), p.scale_bytes, p.zero_bytes);
  return ring_stages(c, stage, t.shared_bytes) >= kFewestStages &&
         ring_shared_bytes(c, stage, t.shared_bytes) + barrier_bytes(most_stages(c)) <= t.shared_bytes;
}
bool fits(DecodeConfig const& c, WeightOnlyMmProblem const& p, Target const& t) {
  return p.m <= c.tokens && ring_fits(c, p, t);
}

// Of the family's table, for this target.
bool is_built(Family family, int row, Target const& t) {
  if (family == Family::kRing || family == Family::kWgmma) return t.has_wgmma;
  std::size_t const rows = family == Family::kStream ? kGemvRows.size() : kTiledRows.size();
  return t.arch != Arch::kSm75 || row + 1 == static_cast<int>(rows);
}

template <class Rows>
bool is_there(Rows const& rows, Family family, int row, WeightOnlyMmProblem const& p, Target const& t) {
  return row >= 0 && row < static_cast<int>(rows.size()) && is_built(family, row, t) && fits(rows[row], p, t);
}

bool is_there(Family family, int row, WeightOnlyMmProblem const& p, Target const& t) {
  switch (family) {
    case Family::kStream:
      return is_there(kGemvRows, family, row, p, t);
    case Family::kTiled:
      return is_there(kTiledRows, family, row, p, t);
    case Family::kRing:
      return !p.offsets && is_there(kDecodeRows, family, row, p, t);
    case Family::kWgmma:
      return !p.offsets && is_there(kWgmmaRows, family, row, p, t) && (p.same_type || !kWgmmaRows[row].rounds);
    default:
      return false;
  }
}

double time_of_dense(WeightOnlyMmProblem const& p) {
  double const weights = static_cast<double>(p.n) * p.k;
  return kDenseTime.call + weights * (kDenseTime.weight + p.m * kDenseTime.product);
}

// No tile of twice as many tokens as there are, or more, was ever the fastest.
bool suits(WgmmaConfig const& c, WeightOnlyMmProblem const& p) {
  return c.tokens < 2 * p.m && c.tokens >= std::min<std::int64_t>((p.m + 1) / 2, kWideTokens) &&
         (!c.rounds || p.m > kExactTokens);
}
// One or two tokens are the GEMV's.
bool suits(DecodeConfig const& c, WeightOnlyMmProblem const& p) {
  return p.m > kDigitTokens && (c.tokens == kDecodeRows.front().tokens || c.tokens < 2 * p.m);
}
bool suits(GemvConfig const&, WeightOnlyMmProblem const&) { return true; }
bool suits(TiledConfig const& c, WeightOnlyMmProblem const& p) { return c.tokens < 2 * std::max<std::int64_t>(p.m, 9); }

template <class Config>
std::int64_t waves_of(Config const& c, WeightOnlyMmProblem const& p, int split, Target const& t) {
  std::int64_t const tiles = tiles_of(c, p);
  return ceil_div(tiles, clusters(split, blocks_of_sm(c, tiles, split, t.sm_count), t));
}

// Per wave: a CTA that splits K has one tile, and ends with it.
template <class Config>
double cluster_time(ClusterTime const& time, Config const& c, WeightOnlyMmProblem const& p, int split,
                    Target const& t) {
  if (split == 1) return 0;
  double const once = time.tile + time.sum * c.rows() * c.tokens + time.crowd * std::max(split - kCrowd, 0);
  return static_cast<double>(waves_of(c, p, split, t)) * once;
}

// Per CTA. A last round that leaves K groups idle counts half for them.
template <class Config>
double steps_of(Config const& c, WeightOnlyMmProblem const& p, int split) {
  std::int64_t const steps = ceil_div(ceil_div(p.k, kPadding), split);
  return static_cast<double>(steps + round_up(steps, c.k_groups)) / 2;
}

// A p-norm: the longer of two overlapping times, plus less of the other the higher the exponent.
double longer(double a, double b, double exponent) {
  return std::pow(std::pow(a, exponent) + std::pow(b, exponent), 1 / exponent);
}

template <class Config>
double tile_time(Config const& c, TileTimes const& times, WeightOnlyMmProblem const& p, int split, Target const& t,
                 double steps) {
  std::int64_t const high = ceil_div(p.n, c.rows()), wide = ceil_div(p.m, c.tokens);
  int const of_sm = blocks_of_sm(c, high * wide, split, t.sm_count);
  std::int64_t const at_once = clusters(split, of_sm, t);
  // Weights of a step. Tiles of the same rows are neighbours: memory delivers them once.
  double const of_block = c.rows() * kPadding * p.bits / 8;
  double const of_all = static_cast<double>(std::min(high, ceil_div(at_once, wide)) * split) * of_block;
  TileTimes::Time const& time = times.of(p.bits);
  double const reading = std::max(of_all / (kReading.rate * memory_rate(t)), of_block * of_sm / kReading.sm);
  double const step = longer(time.step, reading, std::max(1.0, static_cast<double>(c.tokens) / kReading.whole));
  return static_cast<double>(waves_of(c, p, split, t)) * (steps * step + time.block);
}

// A row's time, by table.
double time_of_row(decltype(kTiledRows) const&, int, WeightOnlyMmProblem const&, int, Target const&) { return 0; }
double time_of_row(decltype(kGemvRows) const&, int row, WeightOnlyMmProblem const& p, int split, Target const& t) {
  return gemv_time(row, p, split, t);
}
double time_of_row(decltype(kWgmmaRows) const& rows, int row, WeightOnlyMmProblem const& p, int split,
                   Target const& t) {
  WgmmaConfig const& c = rows[row];
  double const time = tile_time(c, kWgmmaTimes[row], p, split, t, steps_of(c, p, split)) +
                      cluster_time(lends_ring(c) ? kLentSums : kSentSums, c, p, split, t);
  double const products = static_cast<double>(tiles_of(c, p)) * c.rows() * c.tokens * static_cast<double>(p.k) * 1e-9;
  return longer(time, kWgmmaProducts[row] * products, kLimitExponent);
}
double time_of_row(decltype(kDecodeRows) const& rows, int row, WeightOnlyMmProblem const& p, int split,
                   Target const& t) {
  return tile_time(rows[row], kDecodeTimes[row], p, split, t, steps_of(rows[row], p, split)) +
         cluster_time(kDecodeSums, rows[row], p, split, t);
}

using Timed = tuning::Timed<Choice>;

// The first of equals.
struct Best {
  Timed timed{{Family::kDense, 0, 1, "no kernel fits the shared memory"}, std::numeric_limits<double>::infinity()};

  void consider(Timed const& other) {
    if (other.us < timed.us) timed = other;
  }
};

template <class Rows>
void add(std::vector<Timed>& all, Family family, Rows const& rows, WeightOnlyMmProblem const& p, Target const& t) {
  std::int64_t const steps = ceil_div(p.k, kPadding);
  int const most = t.arch == Arch::kSm90 ? static_cast<int>(std::min<std::int64_t>(steps, kMaxCluster)) : 1;
  for (int row = 0; row < static_cast<int>(rows.size()); ++row) {
    if (!is_there(family, row, p, t) || !suits(rows[row], p)) continue;
    for (int split = 1; split <= most; ++split) {
      if (!may_share(rows[row], p, split, t)) continue;
      all.push_back({{family, row, split}, time_of_row(rows, row, p, split, t)});
    }
  }
}

constexpr Choice kManyTokens{Family::kDense, 0, 1, "many tokens"};

// Where weights may be rounded a dense product is a candidate. mma.sync tiles are without a cost model.
std::vector<Timed> all_candidates(WeightOnlyMmProblem const& p, Target const& t) {
  std::vector<Timed> all;
  if (p.m > kExactTokens) all.push_back({kManyTokens, time_of_dense(p)});
  add(all, Family::kStream, kGemvRows, p, t);
  if (t.has_wgmma && !p.offsets) {
    add(all, Family::kRing, kDecodeRows, p, t);
    add(all, Family::kWgmma, kWgmmaRows, p, t);
  } else {
    add(all, Family::kTiled, kTiledRows, p, t);
  }
  return all;
}

// The candidate that the cost model expects to be the fastest.
Choice fastest(WeightOnlyMmProblem const& p, Target const& t) {
  Best best;
  for (Timed const& candidate : all_candidates(p, t)) {
    if (candidate.choice.family != Family::kTiled) best.consider(candidate);
  }
  return best.timed.choice;
}

// The narrowest tile that holds all tokens, or else the widest.
Choice tiled_choice(WeightOnlyMmProblem const& p, Target const& t) {
  int chosen = -1;
  for (int row = 0; row < static_cast<int>(kTiledRows.size()); ++row) {
    if (!is_there(Family::kTiled, row, p, t)) continue;
    bool const wider = chosen < 0 || kTiledRows[row].tokens > kTiledRows[chosen].tokens;
    if (chosen < 0 || (wider && kTiledRows[chosen].tokens < p.m)) chosen = row;
  }
  if (chosen < 0) return {Family::kDense, 0, 1, "no kernel fits the shared memory"};
  TiledConfig const& config = kTiledRows[chosen];
  std::int64_t const blocks = ceil_div(p.n, config.rows()) * ceil_div(p.m, config.tokens);
  return {Family::kTiled, chosen, best_split(blocks, ceil_div(p.k, kPadding), 4, config.blocks, t)};
}

// Exact weights by two K groups: all such rows sum a scale group's columns in order, and K steps in turn by group. Two
// partial sums commute, so K may be split in two, too; in which order more are added depends on the tokens of a tile.
bool keeps_order(WgmmaConfig const& c) { return c.k_groups == 2 && !c.rounds; }

// The fastest such row, split as is best for few tokens.
Choice in_one_order(WeightOnlyMmProblem const& p, Target const& t) {
  constexpr int kMostSplit = 2;
  int const few = kWgmmaRows.front().tokens;
  auto const fastest_of = [&](WeightOnlyMmProblem const& problem, int first_split, int last_split) {
    Best best;
    for (int row = 0; row < static_cast<int>(kWgmmaRows.size()); ++row) {
      WgmmaConfig const& c = kWgmmaRows[row];
      if (!keeps_order(c) || !is_there(Family::kWgmma, row, problem, t)) continue;
      if (c.tokens != few && c.tokens >= 2 * problem.m) continue;
      for (int split = first_split; split <= last_split; ++split) {
        best.consider({{Family::kWgmma, row, split}, time_of_row(kWgmmaRows, row, problem, split, t)});
      }
    }
    return best.timed.choice;
  };
  WeightOnlyMmProblem of_few = p;
  of_few.m = few / 2;
  auto const most = static_cast<int>(std::min<std::int64_t>(ceil_div(p.k, kPadding), kMostSplit));
  int const split = fastest_of(of_few, 1, most).split;
  return fastest_of(p, split, split);
}

bool has_kernel(std::int64_t group) {
  std::int64_t const steps = group / kPadding;
  return group == 32 || group == 64 || (group % kPadding == 0 && (steps & (steps - 1)) == 0);
}

// Kernels use 32-bit byte offsets into a weight.
bool is_large(WeightOnlyMmProblem const& p) {
  std::int64_t const rows = ceil_div(p.n, kPanelRows) * kPanelRows, groups = ceil_div(padded(p.k), group_of(p));
  return std::max(rows * padded(p.k) * p.bits / 8, rows * groups * 4) >= std::int64_t{1} << 32;
}

}  // namespace

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

bool fits(WgmmaConfig const& c, WeightOnlyMmProblem const& p, Target const& t) { return ring_fits(c, p, t); }

double time_of(WgmmaConfig const& c, TileTimes const& times, WeightOnlyMmProblem const& p, int split, Target const& t) {
  // Whole steps, to which these were fitted.
  return tile_time(c, times, p, split, t, static_cast<double>(ceil_div(ceil_div(p.k, kPadding), split)));
}

std::int64_t shared_bytes(TiledConfig const& c, WeightOnlyMmProblem const& p) {
  return std::max<std::int64_t>(
      c.stages(p.bits) * (c.warps * stage_bytes(p, c.rows() / c.warps) + c.tokens * kPadding * 2),
      c.tokens * (c.rows() + 4) * 4);
}

int best_split(std::int64_t blocks, std::int64_t steps, int fixed, int blocks_per_sm, Target const& t) {
  if (t.arch != Arch::kSm90) return 1;
  auto const cost = [&](int split) {
    return ceil_div(blocks, clusters(split, blocks_per_sm, t)) * (ceil_div(steps, split) + fixed);
  };
  int best = 1;
  for (int split = 2; split <= kMaxCluster && split <= steps; ++split) {
    if (cost(split) < cost(best)) best = split;
  }
  return best;
}

Choice choose(WeightOnlyMmProblem const& p, Target const& t) {
  if (char const* why = why_dense(p, t)) return {Family::kDense, 0, 1, why};
  if (t.has_wgmma && !p.offsets) return fastest(p, t);
  if (p.m >= kDenseTokens) return kManyTokens;
  if (p.m <= kGemvTokens) return fastest(p, t);
  return tiled_choice(p, t);
}

Choice choose_batch_invariant(WeightOnlyMmProblem const& p, Target const& t) {
  Choice choice{Family::kDense, 0, 1, why_dense(p, t)};
  if (choice.why == nullptr) choice = t.has_wgmma && !p.offsets ? in_one_order(p, t) : tiled_choice(p, t);
  if (choice.family != Family::kDense) {
    if (choice.family == Family::kTiled) choice.split = 1;
    return choice;
  }
  throw Unsupported(std::string("epiloq.weight_only_mm: batch_invariant: no kernel for this product (") + choice.why +
                    "), and the dense product that takes its place sums K in an order that depends on M");
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
  if (why == nullptr && kernel.family == Family::kStream && !may_share(kGemvRows[kernel.row], p, kernel.split, t)) {
    why = "no shared memory for the sums of so many blocks";
  }
  if (why != nullptr)
    throw InvalidArgument(
        std::string("epiloq.weight_only_mm: kernel: expected one that fits, got one that does not: ") + why);
  return {kernel.family, kernel.row, kernel.split};
}

std::string Selection::key(WeightOnlyMmProblem const& p) {
  std::ostringstream text;
  text << tuning::key_of(kName, p.m, p.n, p.k) << " bits=" << p.bits << " group=" << group_of(p)
       << " x=" << name(p.dtype) << " scale=" << p.scale_bytes << " zero=" << p.zero_bytes;
  if (!p.aligned) text << " unaligned";
  if (p.offsets) text << " offsets";
  if (!p.same_type) text << " mixed";
  return text.str();
}

std::vector<tuning::Timed<Choice>> Selection::candidates(WeightOnlyMmProblem const& p, Target const& t) {
  if (why_dense(p, t) != nullptr) return {};
  return all_candidates(p, t);
}

std::string describe(Choice const& choice) {
  std::ostringstream text;
  if (choice.family == Family::kDense) {
    text << "dequantise, then a dense product (" << choice.why << ')';
  } else if (choice.family == Family::kStream) {
    GemvConfig const& c = kGemvRows[choice.row];
    text << "stream " << c.panels << " panels of 16 weight rows, " << c.warps << " warps along K, stages " << c.stages
         << (c.digits ? ", tokens as digits" : "");
  } else if (choice.family == Family::kRing) {
    DecodeConfig const& c = kDecodeRows[choice.row];
    text << "ring " << c.rows() << " weight rows x " << c.tokens << " tokens, " << c.warps() << " warps, " << c.k_groups
         << " along K";
  } else if (choice.family == Family::kWgmma) {
    WgmmaConfig const& c = kWgmmaRows[choice.row];
    text << "wgmma " << c.rows() << " weight rows x " << c.tokens << " tokens, " << c.warpgroups() << " warpgroups"
         << (c.k_groups > 1 ? ", " + std::to_string(c.k_groups) + " along K" : "")
         << (c.rounds ? ", weights rounded with their scales" : "");
  } else {
    TiledConfig const& c = kTiledRows[choice.row];
    text << "mma.sync " << c.rows() << " weight rows x " << c.tokens << " tokens, " << c.warps << " warps, stages "
         << c.stages4;
  }
  if (choice.split > 1) text << ", K over clusters of " << choice.split;
  return text.str();
}

}  // namespace epiloq::ops::weight_only_mm
