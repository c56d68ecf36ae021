#include "dispatch/scaled_mm/select.h"

#include <algorithm>
#include <limits>

#include "core/ceil_div.h"
#include "dispatch/scaled_mm/rules.h"
#include "dispatch/scaled_mm/tables.h"
#include "epiloq/error.h"

namespace epiloq::ops::scaled_mm {
namespace {

static_assert(accepts_everything(kSm80BatchRules) && accepts_everything(kInt8OutRules));
static_assert(accepts_everything(kSm90BatchRules) && accepts_everything(kSm90Float8BatchRules));
static_assert(accepts_everything(kSm75Rules) && all_named(kSm75Tiles, kSm75Rules));
static_assert(accepts_everything(kSm80Rules) && all_named(kSm80Tiles, kSm80Rules));
static_assert(accepts_everything(kSm89AccurateRules) && accepts_everything(kSm89FastRules));
static_assert(all_named(kSm89Tiles, kSm89AccurateRules, kSm89FastRules));
static_assert(accepts_everything(kSm90Rules));
static_assert(all_named(kSm90Tiles, kSm90Rules, kSm90BatchRules, kSm90LargeMTiles));
static_assert(all_named(kSm90Float8Tiles, kSm90Float8BatchRules, kSm90FastLargeMTiles));

// Accurate accumulation never uses a fast tile.
template <class Tiles, class... Rules>
constexpr bool all_accurate(Tiles const& tiles, Rules const&... lists) {
  bool accurate = true;
  auto const search = [&](auto const& rules) {
    for (Rule const& rule : rules) accurate &= !tiles[rule.tile].fast_accum;
  };
  (search(lists), ...);
  return accurate;
}
static_assert(all_accurate(kSm89Tiles, kSm89AccurateRules));

static_assert(!kSm89Tiles[kE5M2Row].fast_accum && !kSm90Float8Tiles[kE5M2Row].fast_accum);

static_assert(all_accurate(kSm90Float8Tiles, kSm90Float8BatchRules));

// Kernels with per-row scales do not support batches.
template <class Rules>
constexpr bool all_rows_here(Rules const& rules) {
  return std::ranges::none_of(rules, [](Rule const& rule) { return rule.tile == kByCost; });
}
static_assert(all_rows_here(kSm90BatchRules) && all_rows_here(kSm90Float8BatchRules));

template <class Tiles, class Rules>
Choice mma_choice(Family family, Tiles const& tiles, Rules const& rules, ScaledMmProblem const& p, Target const& t) {
  auto const tile = first_fit(rules, p, [&](int tile) { return tiles[tile].shared_bytes() <= t.shared_bytes; });
  if (!tile) throw Unsupported("epiloq.scaled_mm: no tile fits the shared memory of this device");
  return {family, *tile};
}

constexpr int kSkinnyRows = 16;

bool fits(SkinnyConfig const& config, ScaledMmProblem const& p) {
  return config.tokens >= p.m && config.panels * kSkinnyRows <= p.n;
}

// The fewest panels on the busiest SM; then the most per CTA, since each CTA reads every token.
Choice skinny_choice(ScaledMmProblem const& p, Target const& t) {
  int best = -1;
  std::int64_t best_load = 0;
  int tokens = 0;
  for (int row = 0; row < static_cast<int>(kSkinnyTiles.size()); ++row) {
    SkinnyConfig const& config = kSkinnyTiles[row];
    if (!fits(config, p)) continue;
    if (best >= 0 && config.tokens != tokens) break;  // the table is sorted by tokens
    std::int64_t const load = ceil_div(ceil_div(p.n, config.panels * kSkinnyRows), t.sm_count) * config.panels;
    if (best < 0 || load <= best_load) {
      best = row;
      best_load = load;
      tokens = config.tokens;
    }
  }
  return {Family::kSkinny, best};
}

template <class Tiles, class LargeM>
constexpr bool all_as_their_rows(Tiles const& tiles, LargeM const& large_m_tiles) {
  return std::ranges::all_of(large_m_tiles, [&](LargeMTile const& large) {
    CutlassWgmmaConfig const& c = tiles[large.tile];
    return large.tokens == (c.swap ? c.tile.n : c.tile.m) && large.weights == (c.swap ? c.tile.m : c.tile.n);
  });
}
static_assert(all_as_their_rows(kSm90Tiles, kSm90LargeMTiles) &&
              all_as_their_rows(kSm90Float8Tiles, kSm90FastLargeMTiles));

GroupwiseMmProblem per_row_problem(ScaledMmProblem const& p) {
  return {.m = p.m, .n = p.n, .k = p.k, .per_row_scales = true, .a = p.a, .batch_invariant = p.batch_invariant};
}

groupwise_mm::Tile timed_tile(LargeMTile const& large) {
  return {{large.tokens / 64, 1, large.weights}, large.step_ns, large.end_ns};
}

groupwise_mm::Cost cost_of(LargeMTile const& large, ScaledMmProblem const& p, Target const& t) {
  GroupwiseMmProblem in_boxes = per_row_problem(p);
  if (p.m % large.tokens != 0) in_boxes.m += std::int64_t{large.more_rows} * large.tokens;
  return groupwise_mm::cost_of(timed_tile(large), in_boxes, t.sm_count);
}

// The costs of a CUTLASS tile that competes with groupwise_mm's, or null.
LargeMTile const* large_m_tile(Choice const& choice) {
  auto const find = [&](auto const& large_m_tiles) {
    auto const found = std::ranges::find(large_m_tiles, choice.row, &LargeMTile::tile);
    return found == large_m_tiles.end() ? nullptr : &*found;
  };
  if (choice.family == Family::kSm90) return find(kSm90LargeMTiles);
  return choice.family == Family::kSm90Float8 ? find(kSm90FastLargeMTiles) : nullptr;
}

// One of groupwise_mm's tiles with per-row scales, or a LargeMTile.
Choice per_row_choice(ScaledMmProblem const& p, Target const& t) {
  auto const own = groupwise_mm::choose_per_row(per_row_problem(p), t.sm_count);
  Choice best{Family::kGroupwise, 0, own.choice};
  double best_ns = own.ns;
  auto const consider = [&](Family family, auto const& large_m_tiles) {
    for (LargeMTile const& large : large_m_tiles) {
      if (p.m <= large.tokens) continue;
      double const ns = cost_of(large, p, t).ns;
      if (ns >= best_ns) continue;
      best = {family, large.tile};
      best_ns = ns;
    }
  };
  if (p.a == DType::kInt8) {
    consider(Family::kSm90, kSm90LargeMTiles);
  } else if (p.fast_accum && !p.batch_invariant) {
    consider(Family::kSm90Float8, kSm90FastLargeMTiles);
  }
  return best;
}

using Timed = tuning::Timed<Choice>;

template <class Tiles>
std::vector<Timed> mma_candidates(Family family, Tiles const& tiles, ScaledMmProblem const& p, Target const& t) {
  std::vector<Timed> all;
  for (int row = 0; row < static_cast<int>(tiles.size()); ++row) {
    bool const accurate = !tiles[row].fast_accum || p.fast_accum;
    if (accurate && tiles[row].shared_bytes() <= t.shared_bytes) all.push_back({{family, row}});
  }
  return all;
}

// CUTLASS tiles, not many times wider than there are tokens; then groupwise_mm's.
template <class Tiles>
std::vector<Timed> sm90_candidates(Family family, Tiles const& tiles, ScaledMmProblem const& p, Target const& t) {
  std::vector<Timed> all;
  constexpr double kUs = 1e-3;
  for (int row = 0; row < static_cast<int>(tiles.size()); ++row) {
    CutlassWgmmaConfig const& c = tiles[row];
    int const tokens = c.swap ? c.tile.n : c.tile.m;
    if ((c.fast_accum && !p.fast_accum) || tokens > 2 * std::max<std::int64_t>(p.m, 32)) continue;
    LargeMTile const* const large = large_m_tile({family, row});
    all.push_back({{family, row}, large == nullptr ? 0 : kUs * cost_of(*large, p, t).ns});
  }
  for (auto const& [own, us] : groupwise_mm::Selection::candidates(per_row_problem(p), t)) {
    all.push_back({{Family::kGroupwise, 0, own}, us});
  }
  return all;
}

template <class Rules>
Choice sm90_choice(Family family, Rules const& rules, ScaledMmProblem const& p, Target const& t) {
  int const row = *first_fit(rules, p, [](int) { return true; });
  return row == kByCost ? per_row_choice(p, t) : Choice{family, row};
}

Choice sm90_int8_choice(ScaledMmProblem const& p, Target const& t) {
  if (p.batches > 1) return sm90_choice(Family::kSm90, kSm90BatchRules, p, t);
  return sm90_choice(Family::kSm90, kSm90Rules, p, t);
}

// int8 sums are exact, so any kernel is batch invariant; float8 with rules uses those for one row.
ScaledMmProblem ruled(ScaledMmProblem p) {
  if (p.batch_invariant) p.m = 1;
  return p;
}

Choice sm90_float8_choice(ScaledMmProblem const& p, Target const& t) {
  if (p.batches > 1) return sm90_choice(Family::kSm90Float8, kSm90Float8BatchRules, ruled(p), t);
  return per_row_choice(p, t);
}

Choice sm89_choice(ScaledMmProblem const& p, Target const& t) {
  return p.fast_accum ? mma_choice(Family::kSm89, kSm89Tiles, kSm89FastRules, p, t)
                      : mma_choice(Family::kSm89, kSm89Tiles, kSm89AccurateRules, p, t);
}

Choice float8_choice(ScaledMmProblem const& p, Target const& t) {
  if (!p.aligned || p.k == 0) return {Family::kGenericFloat8, 0};
  bool const has_e5m2 = p.a == DType::kFloat8E5M2 || p.b == DType::kFloat8E5M2;
  switch (t.arch) {
    case Arch::kSm90:
      return has_e5m2 ? Choice{Family::kSm90Float8, kE5M2Row} : sm90_float8_choice(p, t);
    case Arch::kSm89:
      return has_e5m2 ? Choice{Family::kSm89, kE5M2Row} : sm89_choice(ruled(p), t);
    default:
      throw Unsupported("epiloq.scaled_mm: arch: expected sm89 or sm90 for float8 operands, got " + name(t.arch));
  }
}

Choice sm80_choice(ScaledMmProblem const& p, Target const& t) {
  if (p.batches > 1) return mma_choice(Family::kSm80, kSm80Tiles, kSm80BatchRules, p, t);
  if (p.m <= kSkinnyTiles.back().tokens && p.n >= kSkinnyRows && p.n <= kSkinnyMaxN) return skinny_choice(p, t);
  return mma_choice(Family::kSm80, kSm80Tiles, kSm80Rules, p, t);
}

Choice int8_out_choice(ScaledMmProblem const& p, Target const& t) {
  bool const runs_sm80 = t.arch == Arch::kSm80 || t.arch == Arch::kSm90;
  if (!p.aligned || p.k == 0 || !runs_sm80) return {Family::kGenericInt8, 0};
  return mma_choice(Family::kSm80Int8, kSm80Tiles, kInt8OutRules, p, t);
}

}  // namespace

Choice Selection::choose(ScaledMmProblem const& p, Target const& t) {
  if (p.a != DType::kInt8) return float8_choice(p, t);
  if (p.int8_out) return int8_out_choice(p, t);
  if (!p.aligned || p.k == 0) return {Family::kGeneric, 0};
  switch (t.arch) {
    case Arch::kSm90:
      return sm90_int8_choice(p, t);
    case Arch::kSm80:
      return sm80_choice(p, t);
    case Arch::kSm75:
      return mma_choice(Family::kSm75, kSm75Tiles, kSm75Rules, p, t);
    case Arch::kSm89:
      throw Unsupported("epiloq.scaled_mm: arch: expected sm75, sm80 or sm90 for int8 operands, got sm89");
    case Arch::kSm100:
    case Arch::kAuto:
      break;
  }
  throw InvalidArgument("epiloq.scaled_mm: arch: expected one architecture, got auto");
}

std::string Selection::key(ScaledMmProblem const& p) {
  std::string text = tuning::key_of(kName, p.m, p.n, p.k) + " a=" + name(p.a) + " b=" + name(p.b);
  if (!p.aligned) text += " unaligned";
  if (p.fast_accum) text += " fast_accum";
  if (p.batches > 1) text += " batches=" + std::to_string(p.batches);
  if (p.int8_out) text += " int8_out";
  return text;
}

double Selection::rank(Timed const& candidate, ScaledMmProblem const& p, Target const& t) {
  if (candidate.choice.family == Family::kGroupwise) {
    return groupwise_mm::Selection::rank({candidate.choice.groupwise, candidate.us}, per_row_problem(p), t);
  }
  LargeMTile const* const large = large_m_tile(candidate.choice);
  bool const considered = large != nullptr && p.m > large->tokens && (p.a == DType::kInt8 || !p.batch_invariant);
  return considered ? candidate.us : std::numeric_limits<double>::infinity();
}

std::string Selection::terms(Choice const& choice, ScaledMmProblem const& p, Target const& t) {
  if (choice.family == Family::kGroupwise) {
    return groupwise_mm::Selection::terms(choice.groupwise, per_row_problem(p), t);
  }
  LargeMTile const* const large = large_m_tile(choice);
  if (large == nullptr || p.m <= large->tokens) return "  no cost model: chosen by M and N (scaled_mm/rules.h)\n";
  return groupwise_mm::terms_of(timed_tile(*large), cost_of(*large, p, t), t.sm_count);
}

std::vector<Timed> Selection::candidates(ScaledMmProblem const& p, Target const& t) {
  bool const is_int8 = p.a == DType::kInt8, is_e4m3 = p.a == DType::kFloat8E4M3 && p.b == DType::kFloat8E4M3;
  if (!p.aligned || p.k == 0 || p.batches > 1 || p.int8_out || !(is_int8 || is_e4m3)) return {};
  switch (t.arch) {
    case Arch::kSm90:
      return is_int8 ? sm90_candidates(Family::kSm90, kSm90Tiles, p, t)
                     : sm90_candidates(Family::kSm90Float8, kSm90Float8Tiles, p, t);
    case Arch::kSm89:
      return is_int8 ? std::vector<Timed>{} : mma_candidates(Family::kSm89, kSm89Tiles, p, t);
    case Arch::kSm80: {
      auto all = mma_candidates(Family::kSm80, kSm80Tiles, p, t);
      for (int row = 0; row < static_cast<int>(kSkinnyTiles.size()); ++row) {
        if (fits(kSkinnyTiles[row], p)) all.push_back({{Family::kSkinny, row}});
      }
      return all;
    }
    case Arch::kSm75:
      return mma_candidates(Family::kSm75, kSm75Tiles, p, t);
    default:
      return {};
  }
}

}  // namespace epiloq::ops::scaled_mm
