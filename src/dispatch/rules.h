#pragma once

// Rules that assign problems to the tiles of a table, for architectures without a cost model.

#include <algorithm>
#include <climits>
#include <optional>

namespace epiloq::ops {

// The problems m <= m_max, n <= n_max take row `tile`; the first rule that fits applies. The last rule of each list
// accepts everything.
struct Rule {
  int m_max, n_max;
  int tile;
};
inline constexpr int kAny = INT_MAX;

template <class Rules>
constexpr bool accepts_everything(Rules const& rules) {
  return rules.back().m_max == kAny && rules.back().n_max == kAny;
}

// Whether every tile has a rule, or another entry, in one of the lists.
template <class Tiles, class... Rules>
constexpr bool all_named(Tiles const& tiles, Rules const&... lists) {
  for (int tile = 0; tile < static_cast<int>(tiles.size()); ++tile) {
    auto const names = [tile](auto const& rule) { return rule.tile == tile; };
    if (!(std::ranges::any_of(lists, names) || ...)) return false;
  }
  return true;
}

// The tile of the first rule that accepts the problem and whose tile `fits` the device, if any.
template <class Rules, class Problem, class Fits>
std::optional<int> first_fit(Rules const& rules, Problem const& p, Fits const& fits) {
  for (Rule const& rule : rules) {
    if (p.m <= rule.m_max && p.n <= rule.n_max && fits(rule.tile)) return rule.tile;
  }
  return std::nullopt;
}

}  // namespace epiloq::ops
