#include "dispatch/groupwise_mm/select.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <span>
#include <sstream>
#include <utility>

#include "core/ceil_div.h"
#include "problems/groupwise_gemm.h"

namespace epiloq::ops::groupwise_mm {
namespace {

std::int64_t rows_of_expert(GroupwiseMmProblem const& p) { return ceil_div(p.m, p.experts); }

// Experts that may have rows: with fewer rows than experts, one row each at most.
std::int64_t experts_with_rows(GroupwiseMmProblem const& p) {
  return p.has_experts ? std::min<std::int64_t>(p.experts, p.m) : p.experts;
}

std::int64_t tiles_of(Tile const& tile, GroupwiseMmProblem const& p) {
  return experts_with_rows(p) * ceil_div(rows_of_expert(p), tile.config.tokens()) * ceil_div(p.n, tile.config.n);
}

// Delay of the next kernel because this one occupies the SMs: if at most half of them are busy, PDL starts the next
// kernel on the others meanwhile. Only used to decide on split-K.
double late_next_ns(std::int64_t blocks, int sm_count) {
  constexpr double kNs = 800;
  double const beyond_half = std::clamp(2.0 * blocks / sm_count - 1, 0.0, 1.0);
  return kNs * beyond_half * beyond_half;
}

// Two warpgroups alternate K steps, and their sums commute: one order of summation for every number of columns, and
// the fastest choice for small M.
bool keeps_order(GroupwiseConfig const& config) { return config.k_groups == 2; }

// Whether there is a kernel for a tile.
bool has_kernel(Tile const& tile, GroupwiseMmProblem const& p) { return p.has_experts || !is_for_experts(tile.config); }

// Small M is bound by memory, which larger tiles do not read faster; the tile for experts was measured there only.
constexpr int kDecodeTokens = 64;
bool suits(Tile const& tile, GroupwiseMmProblem const& p) {
  if (rows_of_expert(p) > kDecodeTokens) return !is_for_experts(tile.config);
  return tile.config.tokens() <= kDecodeTokens;
}

// Kernels that compute D^T; not for experts, whose rows are not the tile's then.
bool has_transposed_kernels(GroupwiseMmProblem const& p) {
  return p.whole_row_scales && !p.has_experts && p.experts == 1 && p.m > kDecodeTokens &&
         is_compiled(gemm::Scales::kColumnsOfWholeRows, p.out);
}

// The problem as a family's tiles divide it.
GroupwiseMmProblem as_tiled(Family family, GroupwiseMmProblem p) {
  if (family == Family::kSm90Transposed) std::swap(p.m, p.n);
  return p;
}

// int8 sums are exact in any order.
bool needs_one_order(GroupwiseMmProblem const& p) { return p.batch_invariant && p.a != DType::kInt8; }

// The tiles of a family that has a cost model, and their kind in `describe`.
struct Table {
  std::span<Tile const> tiles;
  char const* kind;
};
Table table_of(Family family) {
  switch (family) {
    case Family::kSm90:
      return {kTiles, "group-wise"};
    case Family::kSm90ColumnScales:
      return {kColumnScaleTiles, "per-column"};
    case Family::kSm90Transposed:
      return {kTransposedTiles, "transposed, per-column,"};
    case Family::kSm90Int8Rows:
      return {kInt8RowTiles, "per-row"};
    case Family::kSm90Float8Rows:
      return {kFloat8RowTiles, "per-row"};
    case Family::kGeneric:
    case Family::kMma:
      break;
  }
  return {};
}

// The tile of a choice with a cost model, or null.
Tile const* tile_of(Choice const& choice) {
  std::span<Tile const> const tiles = table_of(choice.family).tiles;
  return tiles.empty() ? nullptr : &tiles[choice.row];
}

// The cheapest row; among equal ones the last, whose tiles are larger, without split-K.
PerRowChoice cheapest(Family family, GroupwiseMmProblem const& problem, int sm_count) {
  GroupwiseMmProblem const p = as_tiled(family, problem);
  std::span<Tile const> const tiles = table_of(family).tiles;
  bool const one_order = needs_one_order(p);
  auto const best_of = [&](int split_k) {
    PerRowChoice best{{family, 0, split_k}, std::numeric_limits<double>::infinity()};
    for (int row = 0; row < static_cast<int>(tiles.size()); ++row) {
      if (!has_kernel(tiles[row], p) || !suits(tiles[row], p)) continue;
      if (one_order && !keeps_order(tiles[row].config)) continue;
      double const ns = cost_of(tiles[row], p, sm_count, split_k).ns;
      if (ns <= best.ns) best = {{family, row, split_k}, ns};
    }
    return best;
  };
  auto const late_next = [&](Choice const& choice) {
    return cost_of(tiles[choice.row], p, sm_count, choice.split_k).late_next_ns;
  };
  auto const alone = best_of(1);
  if (one_order) return alone;  // which tiles are split depends on M
  auto const shared = best_of(2);
  return shared.ns + late_next(shared.choice) < alone.ns + late_next(alone.choice) ? shared : alone;
}

using Timed = tuning::Timed<Choice>;

std::vector<Timed> candidates_of(Family family, GroupwiseMmProblem const& problem, int sm_count) {
  GroupwiseMmProblem const p = as_tiled(family, problem);
  std::span<Tile const> const tiles = table_of(family).tiles;
  std::vector<Timed> all;
  constexpr std::int64_t kFewest = 64;
  for (int row = 0; row < static_cast<int>(tiles.size()); ++row) {
    if (!has_kernel(tiles[row], p)) continue;
    if (tiles[row].config.tokens() > 2 * std::max(rows_of_expert(p), kFewest)) continue;
    for (int split_k : {1, 2}) {
      double const ns = cost_of(tiles[row], p, sm_count, split_k).ns;
      if (std::isfinite(ns)) all.push_back({{family, row, split_k}, 1e-3 * ns});
    }
  }
  return all;
}

// mma.sync has a tile for small M or N, and one for large.
int mma_row(GroupwiseMmProblem const& p) {
  WarpTileConfig const& small = kMmaTiles[0];
  return p.m <= std::int64_t{p.experts} * small.tile_m() || p.n <= small.tile_n() ? 0 : 1;
}

std::string describe(WarpTileConfig const& c) {
  std::ostringstream text;
  text << "mma.sync " << c.tile_m() << 'x' << c.tile_n() << "x128 warp " << c.warp_m << 'x' << c.warp_n << " stages "
       << c.stages;
  return text.str();
}

std::string describe(GroupwiseConfig const& c, char const* kind, int split_k, bool transposes) {
  std::ostringstream text;
  int const tokens = transposes ? c.n : c.tokens(), weights = transposes ? c.tokens() : c.n;
  text << "sm90 " << kind << " wgmma, " << tokens << " tokens x " << weights << " weights";
  if (c.k_groups > 1) text << ", " << c.k_groups << " warpgroups along K";
  if (c.m_groups > 2) text << ", " << c.m_groups << " warpgroups";
  if (split_k > 1) text << ", K over clusters of " << split_k;
  if (split_k > 1 && gemm::splits_last_wave(c)) text << " in a last wave";
  return text.str();
}

}  // namespace

Choice Selection::choose(GroupwiseMmProblem const& p, Target const& t) {
  bool const is_int8 = p.a == DType::kInt8;
  if (p.aligned && p.k != 0 && t.arch == (is_int8 ? Arch::kSm80 : Arch::kSm89)) return {Family::kMma, mma_row(p)};
  if (!p.aligned || p.k == 0 || t.arch != Arch::kSm90) return {Family::kGeneric, 0};
  if (p.per_row_scales) return choose_per_row(p, t.sm_count).choice;
  if (p.column_scales) {
    PerRowChoice const general = cheapest(Family::kSm90ColumnScales, p, t.sm_count);
    if (!has_transposed_kernels(p)) return general.choice;
    PerRowChoice const of_whole_rows = cheapest(Family::kSm90Transposed, p, t.sm_count);
    return of_whole_rows.ns < general.ns ? of_whole_rows.choice : general.choice;
  }
  return cheapest(Family::kSm90, p, t.sm_count).choice;
}

PerRowChoice choose_per_row(GroupwiseMmProblem const& p, int sm_count) {
  return cheapest(p.a == DType::kInt8 ? Family::kSm90Int8Rows : Family::kSm90Float8Rows, p, sm_count);
}

Cost cost_of(Tile const& tile, GroupwiseMmProblem const& p, int sm_count, int split_k) {
  Cost cost{.tiles = tiles_of(tile, p), .steps = ceil_div(p.k, gemm::kGroupDepth)};
  cost.late_next_ns = late_next_ns(cost.tiles * split_k, sm_count);
  double const whole_ns = static_cast<double>(cost.steps * tile.step_ns + tile.end_ns);
  if (split_k == 1) {
    cost.waves = ceil_div(cost.tiles, sm_count);
    cost.ns = static_cast<double>(cost.waves) * whole_ns;
    return cost;
  }
  cost.split_tiles = gemm::split_tiles(tile.config, cost.tiles, sm_count);
  bool const may_split =
      tile.split_ns > 0 && !p.has_experts && p.experts == 1 && cost.split_tiles > 0 && cost.steps >= split_k;
  if (!may_split) {
    cost.ns = std::numeric_limits<double>::infinity();
    return cost;
  }
  cost.waves = (cost.tiles - cost.split_tiles) / (sm_count / 2 * 2);
  cost.split_steps = ceil_div(cost.steps, split_k);
  std::int64_t const tokens = std::min<std::int64_t>(p.m, tile.config.tokens());
  cost.reduction_ns = static_cast<double>(tile.reduction_ns + tokens * tile.reduction_token_ns);
  cost.ns = static_cast<double>(cost.waves) * whole_ns +
            static_cast<double>(cost.split_steps * tile.split_ns + tile.end_ns) + cost.reduction_ns;
  return cost;
}

std::string terms_of(Tile const& tile, Cost const& c, int sm_count) {
  auto const us = [](double ns) { return tuning::fixed(1e-3 * ns, 2) + " us"; };
  auto const steps = [&](std::int64_t count, int ns) {
    return std::to_string(count) + " K steps of " + tuning::fixed(1e-3 * ns, 3) + " us + end " + us(tile.end_ns);
  };
  std::ostringstream text;
  text << "  expected " << us(c.ns) << ": " << c.tiles << " CTA tiles on " << sm_count << " SMs\n";
  if (c.waves > 0) {
    text << "  " << c.waves << (c.waves == 1 ? " wave, " : " waves, each ") << steps(c.steps, tile.step_ns) << '\n';
  }
  if (c.split_tiles > 0) {
    text << "  " << c.split_tiles << " tiles with K over 2 CTAs, " << steps(c.split_steps, tile.split_ns)
         << " + reduction " << us(c.reduction_ns) << '\n';
  }
  text << "  delay of the next kernel " << us(c.late_next_ns) << " (decides only whether K is split)\n";
  return text.str();
}

std::string Selection::key(GroupwiseMmProblem const& p) {
  std::string text = tuning::key_of(kName, p.m, p.n, p.k) + " a=" + name(p.a);
  text += p.per_row_scales ? " rows" : p.column_scales ? " columns" : " blocks";
  if (p.whole_row_scales) text += p.out == DType::kFloat32 ? " of whole rows, float32" : " of whole rows";
  if (!p.aligned) text += " unaligned";
  if (p.has_experts || p.experts > 1) text += " experts=" + std::to_string(p.experts);
  return text;
}

std::vector<Timed> Selection::candidates(GroupwiseMmProblem const& p, Target const& t) {
  Family const own = choose(p, t).family;
  if (own == Family::kGeneric) return {};
  if (own == Family::kMma) return {{{own, 0}}, {{own, 1}}};
  constexpr Family kColumns = Family::kSm90ColumnScales, kTransposed = Family::kSm90Transposed;
  if (own != kColumns && own != kTransposed) return candidates_of(own, p, t.sm_count);
  std::vector<Timed> all = candidates_of(kColumns, p, t.sm_count);
  if (has_transposed_kernels(p)) {
    std::ranges::move(candidates_of(kTransposed, p, t.sm_count), std::back_inserter(all));
  }
  return all;
}

double Selection::rank(Timed const& candidate, GroupwiseMmProblem const& problem, Target const& t) {
  GroupwiseMmProblem const p = as_tiled(candidate.choice.family, problem);
  Tile const* const tile = tile_of(candidate.choice);
  bool const in_order = tile != nullptr && keeps_order(tile->config) && candidate.choice.split_k == 1;
  if (tile == nullptr || !suits(*tile, p) || (needs_one_order(p) && !in_order)) {
    return std::numeric_limits<double>::infinity();
  }
  return 1e-3 * cost_of(*tile, p, t.sm_count, candidate.choice.split_k).ns;
}

std::string Selection::terms(Choice const& choice, GroupwiseMmProblem const& p, Target const& t) {
  Tile const* const tile = tile_of(choice);
  if (tile == nullptr) return "  no cost model: the only kernel, or the tile that M and N fit (select.cpp)\n";
  return terms_of(*tile, cost_of(*tile, as_tiled(choice.family, p), t.sm_count, choice.split_k), t.sm_count);
}

std::string describe(Choice const& choice) {
  if (choice.family == Family::kGeneric) {
    return "generic, no tensor cores (slow: int8 before SM80, float8 before SM89, K = 0, or a row stride that is no "
           "multiple of 16 bytes)";
  }
  if (choice.family == Family::kMma) return describe(kMmaTiles[choice.row]);
  return describe(tile_of(choice)->config, table_of(choice.family).kind, choice.split_k,
                  choice.family == Family::kSm90Transposed);
}

}  // namespace epiloq::ops::groupwise_mm
