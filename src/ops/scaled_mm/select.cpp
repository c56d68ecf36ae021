#include "ops/scaled_mm/select.h"

#include <algorithm>
#include <sstream>

#include "epiloq/error.h"
#include "ops/scaled_mm/configs.h"

namespace epiloq::ops::scaled_mm {
namespace {

// Every list ends with a rule that takes any problem, and every tile is named by some rule.
template <class Tiles, class Rules>
constexpr bool complete(Tiles const& tiles, Rules const& rules) {
  if (rules.back().m_max != kAny || rules.back().n_max != kAny) return false;
  for (int tile = 0; tile < static_cast<int>(tiles.size()); ++tile) {
    bool named = false;
    for (Rule const& rule : rules) named |= rule.tile == tile;
    if (!named) return false;
  }
  return true;
}
static_assert(complete(kSm75Tiles, kSm75Rules));
static_assert(complete(kSm80Tiles, kSm80Rules));
static_assert(complete(kSm90Tiles, kSm90Rules));

// Early weights are asked for by block number, which names a tile of weights only while the tokens fill one tile.
constexpr bool early_weights_meet_one_token_tile() {
  for (Rule const& rule : kSm90Rules) {
    WgmmaConfig const& config = kSm90Tiles[rule.tile];
    if (config.early_bytes > 0 && (!config.swap || rule.m_max > config.tile.n)) return false;
  }
  return true;
}
static_assert(early_weights_meet_one_token_tile());

template <class Rules, class Fits>
int first_fit(Rules const& rules, ScaledMmProblem const& p, Fits fits) {
  for (Rule const& rule : rules) {
    if (p.m <= rule.m_max && p.n <= rule.n_max && fits(rule.tile)) return rule.tile;
  }
  throw Unsupported("epiloq.scaled_mm: no tile fits the shared memory of this device");
}

template <class Tiles, class Rules>
Choice mma_choice(Family family, Tiles const& tiles, Rules const& rules, ScaledMmProblem const& p, Target const& t) {
  return {family, first_fit(rules, p, [&](int tile) { return tiles[tile].shared_bytes() <= t.shared_bytes; })};
}

constexpr int kSkinnyRows = 16;

// The fewest slabs that the busiest SM reads; then the most to a block, since each block reads every token.
Choice skinny_choice(ScaledMmProblem const& p, Target const& t) {
  auto const ceil_div = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  int best = -1;
  std::int64_t best_load = 0;
  int tokens = 0;
  for (int row = 0; row < static_cast<int>(kSkinnyTiles.size()); ++row) {
    SkinnyConfig const& config = kSkinnyTiles[row];
    if (config.tokens < p.m || config.slabs * kSkinnyRows > p.n) continue;
    if (best >= 0 && config.tokens != tokens) break;  // the table goes by tokens, fewest first
    std::int64_t const load = ceil_div(ceil_div(p.n, config.slabs * kSkinnyRows), t.sm_count) * config.slabs;
    if (best < 0 || load <= best_load) {
      best = row;
      best_load = load;
      tokens = config.tokens;
    }
  }
  return {Family::kSkinny, best};
}

char const* const kScheduleNames[] = {"warp-specialised", "pingpong", "cooperative"};

std::string describe(MmaConfig const& c, char const* arch) {
  std::ostringstream text;
  text << arch << " mma.sync " << c.tile.m << 'x' << c.tile.n << 'x' << c.tile.k << " warp " << c.warp.m << 'x'
       << c.warp.n << 'x' << c.warp.k << " stages " << c.stages;
  return text.str();
}

std::string describe(WgmmaConfig const& c) {
  std::ostringstream text;
  text << "sm90 wgmma " << (c.swap ? "swap " : "") << c.tile.m << 'x' << c.tile.n << 'x' << c.tile.k << " cluster "
       << c.cluster_m << 'x' << c.cluster_n << ' ' << kScheduleNames[static_cast<int>(c.schedule)];
  if (c.blocks_per_sm > 1) text << ' ' << c.blocks_per_sm << " blocks/SM";
  return text.str();
}

std::string describe(SkinnyConfig const& c) {
  std::ostringstream text;
  text << "sm80 skinny " << c.slabs << " slabs of 16 weight rows, " << c.tokens << " tokens, " << c.warps
       << " warps, unroll " << c.unroll;
  return text.str();
}

}  // namespace

Choice choose(ScaledMmProblem const& p, Target const& t) {
  if (!p.aligned || p.k == 0) return {Family::kGeneric, 0};
  switch (t.arch) {
    case Arch::kSm90:
      return {Family::kSm90, first_fit(kSm90Rules, p, [](int) { return true; })};
    case Arch::kSm80:
      if (p.m <= kSkinnyTiles.back().tokens && p.n >= kSkinnyRows && p.n <= kSkinnyMaxN) return skinny_choice(p, t);
      return mma_choice(Family::kSm80, kSm80Tiles, kSm80Rules, p, t);
    case Arch::kSm75:
      return mma_choice(Family::kSm75, kSm75Tiles, kSm75Rules, p, t);
    case Arch::kAuto:
      break;
  }
  throw InvalidArgument("epiloq.scaled_mm: arch: expected one architecture, got auto");
}

std::string describe(Choice const& choice) {
  switch (choice.family) {
    case Family::kGeneric:
      return "generic dp4a (slow: K % 16, N % 8 or a row stride keeps rows off 16 bytes; pad the weight once)";
    case Family::kSkinny:
      return describe(kSkinnyTiles[choice.row]);
    case Family::kSm75:
      return describe(kSm75Tiles[choice.row], "sm75");
    case Family::kSm80:
      return describe(kSm80Tiles[choice.row], "sm80");
    case Family::kSm90:
      return describe(kSm90Tiles[choice.row]);
  }
  return "";
}

Target nominal(Arch arch) {
  // T4, A100, H100
  constexpr Target kTargets[] = {{Arch::kSm75, 40, 65536}, {Arch::kSm80, 108, 166912}, {Arch::kSm90, 132, 232448}};
  for (Target const& target : kTargets) {
    if (target.arch == arch) return target;
  }
  throw InvalidArgument("epiloq.explain: arch: expected sm75, sm80 or sm90, got " + name(arch));
}

}  // namespace epiloq::ops::scaled_mm
