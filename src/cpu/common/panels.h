#pragma once

// Work sharing of the CPU products: threads take panels of weight rows, each multiplied by all tokens.

#include <functional>
#include <vector>

#include "core/threads.h"
#include "cpu/isa/vectors.h"

namespace epiloq {

// Rows `row` to `row + count` of columns `column` to `column + columns`. Rows may be read up to a
// multiple of kColumnsPerStep.
template <class Sum>
struct PanelSums {
  static constexpr int kMostColumns = 32, kColumnsPerStep = 16;
  Sum const* values;
  int stride;
  int row, count, column, columns;
};
template <class Sum>
using FinishPanel = std::function<void(PanelSums<Sum> const&)>;

// Sums are allocated for a multiple of this number of tokens, which every kernel's block divides.
inline constexpr int kTokensUpTo = 16;

// multiply(row, first token, count, sums [count, panel]) for each `panel` weight rows of `rows` by tokens, `at_once`
// together, then finish(sums).
template <class Sum, class Multiply>
void by_panels(std::int64_t tokens, std::int64_t rows, int panel, std::int64_t at_once, int threads,
               FinishPanel<Sum> const& finish, Multiply const& multiply) {
  constexpr int kOfLine = sizeof(Line) / sizeof(Sum);
  if (tokens == 0 || rows == 0) return;
  std::int64_t const panels = (rows + panel - 1) / panel;
  at_once = std::min(at_once, tokens);
  share(panels * ((tokens + at_once - 1) / at_once), threads, [&](std::int64_t begin, std::int64_t end) {
    std::vector<Line> lines((at_once + kTokensUpTo - 1) / kTokensUpTo * kTokensUpTo * panel / kOfLine);
    auto* const sums = reinterpret_cast<Sum*>(lines.data());
    for (std::int64_t i = begin; i < end; ++i) {
      auto const row = static_cast<int>(i % panels * panel), first = static_cast<int>(i / panels * at_once);
      auto const count = static_cast<int>(std::min(at_once, tokens - first));
      multiply(row, first, count, sums);
      auto const columns = static_cast<int>(std::min<std::int64_t>(panel, rows - row));
      finish({.values = sums, .stride = panel, .row = first, .count = count, .column = row, .columns = columns});
    }
  });
}

// Number of threads worth waking for so many products, at most `threads`.
inline int threads_for_products(std::int64_t products, int threads) {
  constexpr std::int64_t kWorth = 1 << 17;  // a few microseconds: the time to wake a thread
  return static_cast<int>(std::clamp<std::int64_t>(products / kWorth, 1, std::max(threads, 1)));
}

}  // namespace epiloq
