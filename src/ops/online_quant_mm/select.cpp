#include "ops/online_quant_mm/select.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <sstream>

#include "epiloq/error.h"
#include "ops/online_quant_mm/configs.h"

namespace epiloq::ops::online_quant_mm {
namespace {

// The last rule takes any problem, and every tile is named by some rule.
template <class Tiles, class Rules>
constexpr bool complete(Tiles const& tiles, Rules const& rules) {
  if (rules.back().m_max != kAny || rules.back().n_max != kAny) return false;
  for (int tile = 0; tile < static_cast<int>(tiles.size()); ++tile) {
    if (std::ranges::count(rules, tile, &Rule::tile) == 0) return false;
  }
  return true;
}
static_assert(complete(kTiles, kRules) && complete(kSm75Tiles, kSm75Rules));

// Consumer cards of SM86 and SM89 give a block 99 KiB, those of SM75 64 KiB.
constexpr int most_shared_bytes(BlockwiseConfig const& tile) { return tile.shared_bytes(kGroups.front(), 8); }
static_assert(most_shared_bytes(kTiles[kRules.back().tile]) <= 99 * 1024);
static_assert(std::ranges::all_of(kSm75Tiles, [](auto const& tile) { return most_shared_bytes(tile) <= 64 * 1024; }));

static_assert(kSm90Rules.back().n_max == kAny && kSm90Rules.back().k_max == kAny);

// By the first rule that takes the problem and whose tile fits the device.
template <class Tiles, class Rules>
std::optional<Choice> mma_choice(Family family, Tiles const& tiles, Rules const& rules, OnlineQuantProblem const& p,
                                 Target const& t) {
  for (Rule const& rule : rules) {
    bool const fits = tiles[rule.tile].shared_bytes(static_cast<int>(p.group_size), p.bits) <= t.shared_bytes;
    if (p.m <= rule.m_max && p.n <= rule.n_max && fits) return Choice{family, rule.tile};
  }
  return std::nullopt;
}

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// The tile, and the blocks of a cluster that share its K, with which all are done first.
Choice sm90_choice(OnlineQuantProblem const& p, Target const& t) {
  auto const& tiles = sm90_tiles(p.bits);
  std::int64_t const steps = ceil_div(p.k, kSm90Group), most = std::min<std::int64_t>(steps, kMaxCluster);
  Choice best{};
  std::int64_t least = INT64_MAX;
  for (int row = 0; row < static_cast<int>(tiles.size()); ++row) {
    std::int64_t const count = ceil_div(p.m, tiles[row].tokens) * ceil_div(p.n, 128);
    for (int split = 1; split <= most; ++split) {
      std::int64_t const at_once = std::max<std::int64_t>(1, kClusters[0][split - 1] * t.sm_count / kSmsOfClusters);
      // Clusters have one tile each, and others than the first would begin anew.
      if (split > 1 && count > at_once) break;
      std::int64_t const of_tile = ceil_div(steps, split) * tiles[row].step_ns + tiles[row].tokens * kSm90TokenNs;
      std::int64_t const shared = split > 1 ? tiles[row].tokens * kSm90SentTokenNs + (split - 1) * kSm90SplitNs : 0;
      std::int64_t const time = ceil_div(count, at_once) * of_tile + shared;
      if (time < least) best = {Family::kSm90, row, split}, least = time;
    }
  }
  return best;
}

bool suits_sm90(OnlineQuantProblem const& p) {
  auto const* const rule =
      std::ranges::find_if(kSm90Rules, [&](Sm90Rule const& r) { return p.n <= r.n_max && p.k <= r.k_max; });
  return p.m >= (p.bits == 8 ? rule->min_tokens8 : rule->min_tokens4);
}

}  // namespace

bool has_fused_kernel(std::int64_t group_size) { return std::ranges::count(kGroups, group_size) > 0; }

Choice choose(OnlineQuantProblem const& p, Target const& t) {
  if (t.arch == Arch::kAuto) throw InvalidArgument("epiloq.online_quant_mm: arch: expected one architecture, got auto");
  if (!has_fused_kernel(p.group_size)) return {Family::kStaged, 0};
  if (t.arch == Arch::kSm90 && p.group_size == kSm90Group && suits_sm90(p)) return sm90_choice(p, t);
  std::optional<Choice> choice;
  if (t.arch == Arch::kSm75) choice = mma_choice(Family::kSm75, kSm75Tiles, kSm75Rules, p, t);
  if (t.arch == Arch::kSm90) choice = mma_choice(Family::kSm80, kTiles, kSm90FewRules, p, t);
  if (t.arch != Arch::kSm75 && !choice) choice = mma_choice(Family::kSm80, kTiles, kRules, p, t);
  return choice.value_or(Choice{Family::kStaged, 0});
}

std::string describe(Choice const& choice, OnlineQuantProblem const& p) {
  std::ostringstream text;
  if (choice.family == Family::kStaged) {
    text << "staged: quantise, then a dp4a product and a pass over float32 sums for each block of " << p.group_size;
    return text.str();
  }
  std::ostringstream operands;
  operands << " w" << p.bits << "a8 blocks of " << p.group_size << ' ';
  if (choice.family == Family::kSm90) {
    text << "sm90 wgmma" << operands.str() << "swap 128x" << sm90_tiles(p.bits)[choice.row].tokens << "x128";
    if (choice.split > 1) text << ", K over clusters of " << choice.split;
    return text.str();
  }
  bool const sm75 = choice.family == Family::kSm75;
  BlockwiseConfig const& c = sm75 ? kSm75Tiles[choice.row] : kTiles[choice.row];
  text << (sm75 ? "sm75" : "sm80") << " mma.sync" << operands.str() << c.tile_m() << 'x' << c.tile_n() << "x128 warp "
       << c.warp_m << 'x' << c.warp_n << " teams " << c.teams << " stages " << c.stages;
  return text.str();
}

Target nominal(Arch arch) { return epiloq::nominal(arch, {Arch::kSm75, Arch::kSm80, Arch::kSm90}); }

}  // namespace epiloq::ops::online_quant_mm
