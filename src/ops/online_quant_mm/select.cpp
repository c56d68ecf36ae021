#include "ops/online_quant_mm/select.h"

#include <algorithm>
#include <sstream>

#include "epiloq/error.h"
#include "ops/online_quant_mm/configs.h"

namespace epiloq::ops::online_quant_mm {
namespace {

// The last rule takes any problem, and every tile is named by some rule.
constexpr bool complete() {
  if (kRules.back().m_max != kAny || kRules.back().n_max != kAny) return false;
  for (int tile = 0; tile < static_cast<int>(kTiles.size()); ++tile) {
    bool named = false;
    for (Rule const& rule : kRules) named |= rule.tile == tile;
    if (!named) return false;
  }
  return true;
}
static_assert(complete());

// Consumer cards of SM86 and SM89 give a block 99 KiB.
static_assert(kTiles[kRules.back().tile].shared_bytes(kGroups.front(), 8) <= 99 * 1024);

// The tile with which the busiest SM is done first.
Choice sm90_choice(OnlineQuantProblem const& p, Target const& t) {
  auto const ceil_div = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  auto const load = [&](BlockwiseSm90Config const& c) {
    return ceil_div(ceil_div(p.m, c.tokens) * ceil_div(p.n, 128), t.sm_count) * c.cost;
  };
  return {Family::kSm90, static_cast<int>(std::ranges::min_element(kSm90Tiles, {}, load) - kSm90Tiles.begin())};
}

}  // namespace

bool has_fused_kernel(std::int64_t group_size, Target const& t) {
  return t.arch != Arch::kSm75 && std::ranges::count(kGroups, group_size) > 0;
}

Choice choose(OnlineQuantProblem const& p, Target const& t) {
  if (t.arch == Arch::kAuto) throw InvalidArgument("epiloq.online_quant_mm: arch: expected one architecture, got auto");
  if (!has_fused_kernel(p.group_size, t)) return {Family::kStaged, 0};
  int const min_tokens = p.n >= kSm90WideRows ? kSm90MinTokensWide : kSm90MinTokens;
  if (t.arch == Arch::kSm90 && p.group_size == kSm90Group && p.m >= min_tokens) return sm90_choice(p, t);
  for (Rule const& rule : kRules) {
    bool const fits = kTiles[rule.tile].shared_bytes(static_cast<int>(p.group_size), p.bits) <= t.shared_bytes;
    if (p.m <= rule.m_max && p.n <= rule.n_max && fits) return {Family::kSm80, rule.tile};
  }
  return {Family::kStaged, 0};
}

std::string describe(Choice const& choice, OnlineQuantProblem const& p) {
  std::ostringstream text;
  if (choice.family == Family::kStaged) {
    text << "staged: quantise, then a dp4a product and a pass over float32 sums for each block of " << p.group_size;
    return text.str();
  }
  bool const sm90 = choice.family == Family::kSm90;
  text << (sm90 ? "sm90 wgmma w" : "sm80 mma.sync w") << p.bits << "a8 blocks of " << p.group_size << ' ';
  if (sm90) {
    text << "swap 128x" << kSm90Tiles[choice.row].tokens << "x128 persistent";
    return text.str();
  }
  BlockwiseConfig const& c = kTiles[choice.row];
  text << c.tile_m() << 'x' << c.tile_n() << "x128 warp " << c.warp_m << 'x' << c.warp_n << " teams " << c.teams
       << " stages " << c.stages;
  return text.str();
}

Target nominal(Arch arch) { return epiloq::nominal(arch, {Arch::kSm75, Arch::kSm80, Arch::kSm90}); }

}  // namespace epiloq::ops::online_quant_mm
