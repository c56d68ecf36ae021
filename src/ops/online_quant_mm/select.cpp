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

// What a tile of so many blocks of K takes, and what adds to it that so many blocks share it.
std::int64_t time_of(BlockwiseSm90Config const& tile, std::int64_t steps, int split) {
  std::int64_t const sent = split > 1 ? tile.tokens * kSm90SentTokenNs + (split - 1) * kSm90SplitNs : 0;
  return ceil_div(steps, split) * tile.step_ns + tile.tokens * kSm90TokenNs + sent;
}

std::int64_t at_once(int split, Target const& t) {
  return std::max<std::int64_t>(1, kClusters[0][split - 1] * t.sm_count / kSmsOfClusters);
}

// The tile, and the blocks of a cluster that share its K, or that of the last wave's, with which all are done first.
Choice sm90_choice(OnlineQuantProblem const& p, Target const& t) {
  auto const& tiles = sm90_tiles(p.bits);
  std::int64_t const steps = ceil_div(p.k, kSm90Group), most = std::min<std::int64_t>(steps, kMaxCluster);
  Choice best{};
  std::int64_t least = INT64_MAX;
  auto const consider = [&](Choice const& choice, std::int64_t time) {
    if (time < least) best = choice, least = time;
  };
  for (int row = 0; row < static_cast<int>(tiles.size()); ++row) {
    auto const& tile = tiles[row];
    std::int64_t const count = ceil_div(p.m, tile.tokens) * ceil_div(p.n, 128), blocks = at_once(1, t);
    consider({Family::kSm90, row}, ceil_div(count, blocks) * time_of(tile, steps, 1));
    for (int split = 2; split <= most; ++split) {
      if (count <= at_once(split, t)) consider({Family::kSm90, row, split}, time_of(tile, steps, split));
    }
    std::int64_t const rest = count % blocks, waves = count / blocks, pairs = at_once(2, t);
    if (steps < 2 || waves == 0 || waves > kSm90MostWaves || rest == 0 || rest > pairs || 2 * pairs != blocks) continue;
    consider({Family::kSm90, row, 2, static_cast<int>(count - rest)},
             waves * time_of(tile, steps, 1) + time_of(tile, steps, 2) + kSm90LastWaveNs);
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
    if (choice.split > 1)
      text << ", K" << (choice.whole > 0 ? " of the last wave" : "") << " over clusters of " << choice.split;
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
