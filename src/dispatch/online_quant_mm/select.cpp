#include "dispatch/online_quant_mm/select.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <sstream>

#include "core/ceil_div.h"
#include "dispatch/online_quant_mm/costs.h"
#include "dispatch/online_quant_mm/tables.h"
#include "epiloq/error.h"
#include "kernels/common/occupancy.h"

namespace epiloq::ops::online_quant_mm {
namespace {

static_assert(accepts_everything(kRules) && all_named(kTiles, kRules));
static_assert(accepts_everything(kSm75Rules) && all_named(kSm75Tiles, kSm75Rules));

// Consumer cards of SM86 and SM89 have 99 KiB of shared memory per CTA, those of SM75 64 KiB.
constexpr int most_shared_bytes(WarpTileConfig const& tile) { return tile.shared_bytes(kGroups.front(), 8); }
static_assert(most_shared_bytes(kTiles[kRules.back().tile]) <= 99 * 1024);
static_assert(std::ranges::all_of(kSm75Tiles, [](auto const& tile) { return most_shared_bytes(tile) <= 64 * 1024; }));

// The first rule that accepts the problem and whose tile fits the device.
template <class Tiles, class Rules>
Choice mma_choice(Family family, Tiles const& tiles, Rules const& rules, OnlineQuantProblem const& p, Target const& t) {
  auto const tile = first_fit(rules, p, [&](int tile) {
    return tiles[tile].shared_bytes(static_cast<int>(p.group_size), p.bits) <= t.shared_bytes;
  });
  return tile ? Choice{family, *tile} : Choice{Family::kStaged, 0};
}

// Whether a row of a family's table is available for this problem and target.
template <class Tiles>
bool is_available(Tiles const& tiles, int row, OnlineQuantProblem const& p, Target const& t) {
  return row >= 0 && row < static_cast<int>(tiles.size()) &&
         tiles[row].shared_bytes(static_cast<int>(p.group_size), p.bits) <= t.shared_bytes;
}
bool is_available(OnlineQuantKernel const& kernel, OnlineQuantProblem const& p, Target const& t) {
  if (!has_fused_kernel(p.group_size)) return false;
  switch (kernel.family) {
    case Family::kSm75:
      return t.arch == Arch::kSm75 && is_available(kSm75Tiles, kernel.row, p, t);
    case Family::kSm80:
      return t.arch != Arch::kSm75 && is_available(kTiles, kernel.row, p, t);
    case Family::kSm90:
      return t.has_wgmma && p.group_size == kSm90Group && kernel.row >= 0 &&
             kernel.row < static_cast<int>(kSm90Tokens.size());
    default:
      return false;
  }
}

double norm(std::initializer_list<double> parts, double power) {
  double sum = 0;
  for (double part : parts) sum += std::pow(part, power);
  return std::pow(sum, 1 / power);
}
double bytes_per_ns(Target const& t) { return kSm90Time.read_rate * t.memory_gb_s; }

std::int64_t steps_of(OnlineQuantProblem const& p) { return ceil_div(p.k, kStep); }

// Expected time of an mma.sync kernel in ns: the p-norm of the first three, and the end of each wave.
struct MmaCost {
  std::int64_t ctas_per_sm, waves, steps;
  double multiplying, waiting, reading, end, ns;
};

MmaCost mma_cost(int row, OnlineQuantProblem const& p, Target const& t) {
  WarpTileConfig const& c = kTiles[row];
  MmaTime const& time = kMmaTimes[row];
  bool const is8 = p.bits == 8;
  int const own_bytes = c.shared_bytes(static_cast<int>(p.group_size), p.bits);
  int const fit = (t.shared_bytes + kReservedPerCta) / (own_bytes + kReservedPerCta);
  std::int64_t const steps = steps_of(p), resident = std::clamp(fit, 1, time.resident[is8]);
  std::int64_t const of_sm = ceil_div(ceil_div(p.m, c.tile_m()) * ceil_div(p.n, c.tile_n()), t.sm_count);
  std::int64_t const waves = ceil_div(of_sm, resident);
  double const multiplying = static_cast<double>(of_sm) * static_cast<double>(steps) * time.work[is8];
  double const waiting = static_cast<double>(waves) * static_cast<double>(ceil_div(steps, c.k_groups)) * time.wait[is8];
  double const reading = static_cast<double>(p.n) * static_cast<double>(p.k) * p.bits / 8 / bytes_per_ns(t);
  double const end = static_cast<double>(waves) * time.end;
  double const ns = norm({multiplying, waiting, reading}, kSm90Time.mma_power) + end;
  return {of_sm, waves, steps, multiplying, waiting, reading, end, ns};
}

// WGMMA tiles along the weight and along tokens.
struct Tiles {
  std::int64_t high, wide;
  Tiles(int row, OnlineQuantProblem const& p) : high(ceil_div(p.n, kSm90Rows)), wide(ceil_div(p.m, kSm90Tokens[row])) {}
  std::int64_t count() const { return high * wide; }
};

// The number of tiles before those of a last wave that pairs of CTAs can split; 0 if there is none, or no wave before
// it.
std::int64_t whole_before_pairs(std::int64_t tiles, std::int64_t steps, Target const& t) {
  std::int64_t const blocks = clusters_at_once(1, 1, t), pairs = clusters_at_once(2, 1, t), rest = tiles % blocks;
  return steps > 1 && rest > 0 && rest <= pairs && 2 * pairs == blocks ? tiles - rest : 0;
}

// Expected time of a wave of WGMMA tiles in ns: K steps, epilogue, and the reduction of split-K.
struct WaveCost {
  std::int64_t steps;
  double step, end, reduction;
  double ns() const { return static_cast<double>(steps) * step + end + reduction; }
};

// The cost of a wave of `tiles` tiles whose K is split in `split` slices, without the kernel's fixed cost.
WaveCost wave_cost(int row, OnlineQuantProblem const& p, std::int64_t tiles, int split, Target const& t) {
  int const tokens = kSm90Tokens[row];
  // Tiles of the same weight rows are neighbours: memory delivers them once, with two parameters per row.
  Tiles const all(row, p);
  auto const rows = static_cast<double>(std::min(all.high, ceil_div(tiles, all.wide)) * kSm90Rows * split);
  double const reading = rows * (kStep * p.bits / 8 + 8) / bytes_per_ns(t);
  double const step = norm({kSm90Steps[row][p.bits == 8], reading}, kSm90Time.power);
  double const reduction = split > 1 ? tokens * kSm90Time.sent_token + (split - 1) * kSm90Time.split : 0;
  return {ceil_div(steps_of(p), split), step, tokens * kSm90Time.token, reduction};
}

double time_of(Choice const& c, OnlineQuantProblem const& p, Target const& t) {
  if (c.family == Family::kSm80) return mma_cost(c.row, p, t).ns;
  std::int64_t const tiles = Tiles(c.row, p).count(), blocks = clusters_at_once(1, 1, t);
  auto const waves = [&](std::int64_t whole) {
    return static_cast<double>(ceil_div(whole, blocks)) * wave_cost(c.row, p, std::min(whole, blocks), 1, t).ns();
  };
  if (c.split == 1) return kSm90Time.begin + waves(tiles);
  double const shared = kSm90Time.begin + wave_cost(c.row, p, tiles - c.whole, c.split, t).ns();
  return c.whole == 0 ? shared : shared + waves(c.whole) + kSm90Time.last_wave;
}

// Wider tiles were not measured.
bool suits(int tokens, OnlineQuantProblem const& p) { return tokens <= 2 * std::max<std::int64_t>(p.m, kSmallM); }

// Tiles, and for WGMMA the ways to split K: in clusters, or for the last wave only.
template <class Act>
void for_each_candidate(OnlineQuantProblem const& p, Target const& t, Act const& act) {
  for (int row = 0; row < static_cast<int>(kTiles.size()); ++row) {
    if (is_available(kTiles, row, p, t) && suits(kTiles[row].tile_m(), p)) act(Choice{Family::kSm80, row});
  }
  if (p.group_size != kSm90Group) return;
  std::int64_t const steps = steps_of(p);
  for (int row = 0; row < static_cast<int>(kSm90Tokens.size()); ++row) {
    if (!suits(kSm90Tokens[row], p)) continue;
    std::int64_t const tiles = Tiles(row, p).count(), whole = whole_before_pairs(tiles, steps, t);
    act(Choice{Family::kSm90, row});
    for (int split = 2; split <= most_split(steps, t); ++split) {
      if (tiles <= clusters_at_once(split, 1, t)) act(Choice{Family::kSm90, row, split});
    }
    if (whole > 0 && whole <= kSm90MostWaves * clusters_at_once(1, 1, t)) {
      act(Choice{Family::kSm90, row, 2, static_cast<int>(whole)});
    }
  }
}

Choice sm90_choice(OnlineQuantProblem const& p, Target const& t) {
  Choice best{};
  double least = std::numeric_limits<double>::infinity();
  for_each_candidate(p, t, [&](Choice const& choice) {
    double const time = time_of(choice, p, t);
    if (time < least) best = choice, least = time;
  });
  return best;
}

// Batch invariance: whole sums of K, by WGMMA tiles, which differ in their tokens alone.
Choice sm90_whole_choice(OnlineQuantProblem const& p, Target const& t) {
  Choice best{Family::kSm90, 0};
  for (int row = 1; row < static_cast<int>(kSm90Tokens.size()); ++row) {
    Choice const other{Family::kSm90, row};
    if (suits(kSm90Tokens[row], p) && time_of(other, p, t) < time_of(best, p, t)) best = other;
  }
  return best;
}

std::string us(double ns, int decimals = 2) { return tuning::fixed(1e-3 * ns, decimals) + " us"; }

std::string mma_terms(MmaCost const& c) {
  std::ostringstream text;
  text << "  expected " << us(c.ns) << ": the p-norm of products, latency and memory, + end\n"
       << "  products " << us(c.multiplying) << ": " << c.ctas_per_sm
       << (c.ctas_per_sm == 1 ? " CTA on the busiest SM, " : " CTAs on the busiest SM, each ") << c.steps
       << " K steps\n"
       << "  latency " << us(c.waiting) << ", memory " << us(c.reading) << ", end of " << c.waves
       << (c.waves == 1 ? " wave " : " waves ") << us(c.end) << '\n';
  return text.str();
}

std::string wgmma_terms(Choice const& c, OnlineQuantProblem const& p, Target const& t) {
  std::int64_t const tiles = Tiles(c.row, p).count(), at_a_time = clusters_at_once(1, 1, t),
                     whole = c.split == 1 ? tiles : c.whole;
  auto const steps = [](WaveCost const& wave) {
    return std::to_string(wave.steps) + " K steps of " + us(wave.step, 3) + " + epilogue " + us(wave.end);
  };
  std::ostringstream text;
  text << "  expected " << us(time_of(c, p, t)) << ": " << tiles << " CTA tiles on " << t.sm_count << " SMs, start "
       << us(kSm90Time.begin) << '\n';
  if (whole > 0) {
    std::int64_t const waves = ceil_div(whole, at_a_time);
    text << "  " << waves << (waves == 1 ? " wave, " : " waves, each ")
         << steps(wave_cost(c.row, p, std::min(whole, at_a_time), 1, t)) << '\n';
  }
  if (c.split > 1) {
    WaveCost const split = wave_cost(c.row, p, tiles - c.whole, c.split, t);
    text << "  " << tiles - whole << " tiles with K over " << c.split << " CTAs, " << steps(split) << " + reduction "
         << us(split.reduction) << '\n';
  }
  if (c.whole > 0) text << "  splitting the last wave must save " << us(kSm90Time.last_wave) << '\n';
  return text.str();
}

}  // namespace

bool has_fused_kernel(std::int64_t group_size) { return std::ranges::count(kGroups, group_size) > 0; }

Choice Selection::choose(OnlineQuantProblem const& p, Target const& t) {
  if (t.arch == Arch::kAuto) throw InvalidArgument("epiloq.online_quant_mm: arch: expected one architecture, got auto");
  if (!has_fused_kernel(p.group_size)) return {Family::kStaged, 0};
  if (t.has_wgmma && !p.batch_invariant) return sm90_choice(p, t);
  if (t.has_wgmma && p.group_size == kSm90Group) return sm90_whole_choice(p, t);
  OnlineQuantProblem ruled = p;
  if (p.batch_invariant) ruled.m = kAny;
  if (t.arch == Arch::kSm75) return mma_choice(Family::kSm75, kSm75Tiles, kSm75Rules, ruled, t);
  return mma_choice(Family::kSm80, kTiles, kRules, ruled, t);
}

Choice choose(OnlineQuantProblem const& p, Target const& t, OnlineQuantKernel const& kernel) {
  bool const shares = kernel.split != 1 || kernel.last_wave;
  std::int64_t whole = 0;
  char const* why = nullptr;
  if (!is_available(kernel, p, t)) {
    why = "no such row, not for this architecture or group size, or too large for its shared memory";
  } else if (shares &&
             (kernel.family != Family::kSm90 || kernel.split < 1 || kernel.split > most_split(steps_of(p), t))) {
    why = "no such split";
  } else if (kernel.last_wave) {
    whole = whole_before_pairs(Tiles(kernel.row, p).count(), steps_of(p), t);
    if (kernel.split != 2 || whole == 0) why = "no last wave that pairs can share";
  }
  if (why != nullptr) {
    throw InvalidArgument(
        std::string("epiloq.online_quant_mm: kernel: expected one that fits, got one that does not: ") + why);
  }
  return {kernel.family, kernel.row, kernel.split, static_cast<int>(whole)};
}

std::string Selection::key(OnlineQuantProblem const& p) {
  return tuning::key_of(kName, p.m, p.n, p.k) + " bits=" + std::to_string(p.bits) +
         " group=" + std::to_string(p.group_size);
}

std::vector<tuning::Timed<Choice>> Selection::candidates(OnlineQuantProblem const& p, Target const& t) {
  std::vector<tuning::Timed<Choice>> all;
  if (!has_fused_kernel(p.group_size) || p.k == 0) return all;
  if (t.has_wgmma) {
    for_each_candidate(p, t, [&](Choice const& choice) { all.push_back({choice, 1e-3 * time_of(choice, p, t)}); });
    return all;
  }
  auto const add = [&](Family family, auto const& tiles) {
    for (int row = 0; row < static_cast<int>(tiles.size()); ++row) {
      if (is_available(tiles, row, p, t) && suits(tiles[row].tile_m(), p)) all.push_back({{family, row}});
    }
  };
  t.arch == Arch::kSm75 ? add(Family::kSm75, kSm75Tiles) : add(Family::kSm80, kTiles);
  return all;
}

double Selection::rank(tuning::Timed<Choice> const& candidate, OnlineQuantProblem const& p, Target const& t) {
  Choice const& choice = candidate.choice;
  bool const keeps_order = choice.family == Family::kSm90 && choice.split == 1 && suits(kSm90Tokens[choice.row], p);
  bool const considered = t.has_wgmma && (!p.batch_invariant || keeps_order);
  return considered ? candidate.us : std::numeric_limits<double>::infinity();
}

std::string Selection::terms(Choice const& choice, OnlineQuantProblem const& p, Target const& t) {
  if (choice.family == Family::kStaged) return "  no cost model: the only kernel for this group size\n";
  if (!t.has_wgmma || (p.batch_invariant && choice.family != Family::kSm90)) {
    return "  no cost model: chosen by M and N (online_quant_mm/tables.h)\n";
  }
  return choice.family == Family::kSm90 ? wgmma_terms(choice, p, t) : mma_terms(mma_cost(choice.row, p, t));
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
    text << "sm90 wgmma" << operands.str() << "swap " << kSm90Rows << 'x' << kSm90Tokens[choice.row] << 'x' << kStep;
    if (choice.split > 1)
      text << ", K" << (choice.whole > 0 ? " of the last wave" : "") << " over clusters of " << choice.split;
    return text.str();
  }
  bool const sm75 = choice.family == Family::kSm75;
  WarpTileConfig const& c = sm75 ? kSm75Tiles[choice.row] : kTiles[choice.row];
  text << (sm75 ? "sm75" : "sm80") << " mma.sync" << operands.str() << c.tile_m() << 'x' << c.tile_n() << "x128 warp "
       << c.warp_m << 'x' << c.warp_n << " K groups " << c.k_groups << " stages " << c.stages;
  return text.str();
}

}  // namespace epiloq::ops::online_quant_mm
