#include "ops/groupwise_mm/select.h"

#include <limits>
#include <sstream>

#include "ops/groupwise_mm/configs.h"

namespace epiloq::ops::groupwise_mm {
namespace {

// The time of a problem in steps of a tile: waves of the SMs, each as long as a step.
std::int64_t cost_of(Tile const& tile, GroupwiseMmProblem const& p, int sm_count) {
  auto const ceil_div = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  GroupwiseConfig const& c = tile.config;
  std::int64_t const rows_of_expert = ceil_div(p.m, p.experts);
  std::int64_t const tiles = p.experts * ceil_div(rows_of_expert, c.tokens()) * ceil_div(p.n, c.n);
  return ceil_div(tiles, sm_count) * tile.step_ns;
}

// The cheapest row; of equals the last, whose tiles are larger.
template <class Tiles>
int cheapest(Tiles const& tiles, GroupwiseMmProblem const& p, int sm_count) {
  int best = 0;
  std::int64_t best_cost = std::numeric_limits<std::int64_t>::max();
  for (int row = 0; row < static_cast<int>(tiles.size()); ++row) {
    std::int64_t const cost = cost_of(tiles[row], p, sm_count);
    if (cost <= best_cost) {
      best = row;
      best_cost = cost;
    }
  }
  return best;
}

// mma.sync has tiles for few rows or columns, and for many.
int mma_row(GroupwiseMmProblem const& p) {
  BlockwiseConfig const& small = kMmaTiles[0];
  return p.m <= std::int64_t{p.experts} * small.tile_m() || p.n <= small.tile_n() ? 0 : 1;
}

std::string describe(BlockwiseConfig const& c) {
  std::ostringstream text;
  text << "mma.sync " << c.tile_m() << 'x' << c.tile_n() << "x128 warp " << c.warp_m << 'x' << c.warp_n << " stages "
       << c.stages;
  return text.str();
}

std::string describe(GroupwiseConfig const& c, char const* kind) {
  std::ostringstream text;
  text << "sm90 " << kind << " wgmma, " << c.tokens() << " tokens x " << c.n << " weights";
  if (c.k_groups > 1) text << ", " << c.k_groups << " warpgroups along K";
  return text.str();
}

}  // namespace

Choice choose(GroupwiseMmProblem const& p, Arch arch, int sm_count) {
  bool const is_int8 = p.a == DType::kInt8;
  if (p.aligned && p.k != 0 && arch == (is_int8 ? Arch::kSm80 : Arch::kSm89)) return {Family::kMma, mma_row(p)};
  if (!p.aligned || p.k == 0 || arch != Arch::kSm90) return {Family::kGeneric, 0};
  if (p.whole_rows) return choose_whole_rows(p, sm_count);
  if (p.column_scales) return {Family::kSm90ColumnScales, cheapest(kColumnScaleTiles, p, sm_count)};
  return {Family::kSm90, cheapest(kTiles, p, sm_count)};
}

Choice choose_whole_rows(GroupwiseMmProblem const& p, int sm_count) {
  if (p.a == DType::kInt8) return {Family::kSm90Int8Rows, cheapest(kInt8RowTiles, p, sm_count)};
  return {Family::kSm90Float8Rows, cheapest(kFloat8RowTiles, p, sm_count)};
}

std::string describe(Choice const& choice) {
  switch (choice.family) {
    case Family::kGeneric:
      return "generic, no tensor cores (slow: int8 before SM80, float8 before SM89, K = 0, or a row stride that is no "
             "multiple of 16 bytes)";
    case Family::kMma:
      return describe(kMmaTiles[choice.row]);
    case Family::kSm90:
      return describe(kTiles[choice.row].config, "group-wise");
    case Family::kSm90ColumnScales:
      return describe(kColumnScaleTiles[choice.row].config, "group-wise") + ", a scale a column";
    case Family::kSm90Int8Rows:
      return describe(kInt8RowTiles[choice.row].config, "whole-row");
    case Family::kSm90Float8Rows:
      return describe(kFloat8RowTiles[choice.row].config, "whole-row");
  }
  return "";
}

}  // namespace epiloq::ops::groupwise_mm
