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

std::int64_t tiles_of(BlockwiseSm90Config const& tile, OnlineQuantProblem const& p) {
  return ceil_div(p.m, tile.tokens) * ceil_div(p.n, 128);
}
std::int64_t steps_of(OnlineQuantProblem const& p) { return ceil_div(p.k, kSm90Group); }

// How many tiles come before those of a last wave that pairs of blocks can share; 0 where there is none, or no wave
// before it.
std::int64_t whole_before_pairs(std::int64_t tiles, std::int64_t steps, Target const& t) {
  std::int64_t const blocks = at_once(1, t), pairs = at_once(2, t), rest = tiles % blocks;
  return steps > 1 && rest > 0 && rest <= pairs && 2 * pairs == blocks ? tiles - rest : 0;
}

// The tile, and the blocks of a cluster that share its K, or that of the last wave's, with which all are done first.
Choice sm90_choice(OnlineQuantProblem const& p, Target const& t) {
  auto const& tiles = sm90_tiles(p.bits);
  std::int64_t const steps = steps_of(p), most = std::min<std::int64_t>(steps, kMaxCluster), blocks = at_once(1, t);
  Choice best{};
  std::int64_t least = INT64_MAX;
  auto const consider = [&](Choice const& choice, std::int64_t time) {
    if (time < least) best = choice, least = time;
  };
  for (int row = 0; row < static_cast<int>(tiles.size()); ++row) {
    auto const& tile = tiles[row];
    std::int64_t const count = tiles_of(tile, p);
    consider({Family::kSm90, row}, ceil_div(count, blocks) * time_of(tile, steps, 1));
    for (int split = 2; split <= most; ++split) {
      if (count <= at_once(split, t)) consider({Family::kSm90, row, split}, time_of(tile, steps, split));
    }
    std::int64_t const whole = whole_before_pairs(count, steps, t), waves = whole / blocks;
    if (whole == 0 || waves > kSm90MostWaves) continue;
    consider({Family::kSm90, row, 2, static_cast<int>(whole)},
             waves * time_of(tile, steps, 1) + time_of(tile, steps, 2) + kSm90LastWaveNs);
  }
  return best;
}

// Of a family's table, for this target.
template <class Tiles>
bool is_there(Tiles const& tiles, int row, OnlineQuantProblem const& p, Target const& t) {
  return row >= 0 && row < static_cast<int>(tiles.size()) &&
         tiles[row].shared_bytes(static_cast<int>(p.group_size), p.bits) <= t.shared_bytes;
}
bool is_there(OnlineQuantKernel const& kernel, OnlineQuantProblem const& p, Target const& t) {
  if (!has_fused_kernel(p.group_size)) return false;
  switch (kernel.family) {
    case Family::kSm75:
      return t.arch == Arch::kSm75 && is_there(kSm75Tiles, kernel.row, p, t);
    case Family::kSm80:
      return t.arch != Arch::kSm75 && is_there(kTiles, kernel.row, p, t);
    case Family::kSm90:
      return t.arch == Arch::kSm90 && p.group_size == kSm90Group && kernel.row >= 0 &&
             kernel.row < static_cast<int>(sm90_tiles(p.bits).size());
    default:
      return false;
  }
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
  if (t.arch == Arch::kSm90) choice = mma_choice(Family::kSm80, kTiles, sm90_few_rules(p.bits), p, t);
  if (t.arch != Arch::kSm75 && !choice) choice = mma_choice(Family::kSm80, kTiles, kRules, p, t);
  return choice.value_or(Choice{Family::kStaged, 0});
}

Choice choose(OnlineQuantProblem const& p, Target const& t, OnlineQuantKernel const& kernel) {
  bool const shares = kernel.split != 1 || kernel.last_wave;
  std::int64_t whole = 0;
  char const* why = nullptr;
  if (!is_there(kernel, p, t)) {
    why = "no such row, not for this architecture or group size, or too large for its shared memory";
  } else if (shares && (kernel.family != Family::kSm90 || kernel.split < 1 || kernel.split > kMaxCluster ||
                        kernel.split > steps_of(p))) {
    why = "no such split";
  } else if (kernel.last_wave) {
    whole = whole_before_pairs(tiles_of(sm90_tiles(p.bits)[kernel.row], p), steps_of(p), t);
    if (kernel.split != 2 || whole == 0) why = "no last wave that pairs can share";
  }
  if (why != nullptr) {
    throw InvalidArgument(
        std::string("epiloq.online_quant_mm: kernel: expected one that fits, got one that does not: ") + why);
  }
  return {kernel.family, kernel.row, kernel.split, static_cast<int>(whole)};
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
