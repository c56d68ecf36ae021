#pragma once

// Kernels of a table by what they are compiled for. A Family has kRows, a type Launch, and launch<row, type of x, bits,
// scale groups per K step, offsets>(), null if this build lacks the kernel; and is_narrow(row), if it has rows for 2
// and 3 bits, whose groups may have 16 columns.

#include <algorithm>
#include <array>
#include <utility>

#include "problems/packed_layout.h"
#include "problems/weight_only.h"

namespace epiloq::ops::weight_only_mm {

// A row's kernels by type, bits, scale groups per K step, and offsets.
inline constexpr std::array kVariantBits{4, 8, 2, 3};
inline constexpr std::array kVariantGroups{1, 2, 4, 8};
template <class Launch>
using ByGroups = std::array<std::array<Launch, 2>, kVariantGroups.size()>;
template <class Launch>
using ByBits = std::array<ByGroups<Launch>, kVariantBits.size()>;
template <class Launch>
using Variants = std::array<ByBits<Launch>, 2>;

template <class Family, int kRow, DType kX, int kBits, int kGroups, bool kOffsets>
constexpr typename Family::Launch launch_of() {
  constexpr bool kIsCompiled = [] {
    if constexpr (kBits >= 4)
      return kGroups < kVariantGroups.back();
    else if constexpr (requires { Family::is_narrow(kRow); })
      return Family::is_narrow(kRow);
    else
      return false;
  }();
  if constexpr (kIsCompiled) return Family::template launch<kRow, kX, kBits, kGroups, kOffsets>();
  return nullptr;
}

template <class Family, int kRow, DType kX, int kBits, std::size_t... kGroup>
constexpr ByGroups<typename Family::Launch> by_groups(std::index_sequence<kGroup...>) {
  return {{{launch_of<Family, kRow, kX, kBits, kVariantGroups[kGroup], false>(),
            launch_of<Family, kRow, kX, kBits, kVariantGroups[kGroup], true>()}...}};
}

template <class Family, int kRow, DType kX, std::size_t... kBits>
constexpr ByBits<typename Family::Launch> by_bits(std::index_sequence<kBits...>) {
  return {by_groups<Family, kRow, kX, kVariantBits[kBits]>(std::make_index_sequence<kVariantGroups.size()>{})...};
}

template <class Family, int... kRows>
constexpr std::array<Variants<typename Family::Launch>, sizeof...(kRows)> table(std::integer_sequence<int, kRows...>) {
  constexpr std::make_index_sequence<kVariantBits.size()> kBits;
  return {Variants<typename Family::Launch>{
      {by_bits<Family, kRows, DType::kFloat16>(kBits), by_bits<Family, kRows, DType::kBFloat16>(kBits)}}...};
}

template <class Family>
constexpr auto kTable = table<Family>(std::make_integer_sequence<int, Family::kRows>{});

// Null if this build lacks the kernel.
template <class Family>
typename Family::Launch variant_of(int row, DType x, Weight const& w) {
  auto const index = [](auto const& values, int value) { return std::ranges::find(values, value) - values.begin(); };
  int const groups = std::max(1, kPadding / w.group);
  return kTable<Family>[row][x == DType::kBFloat16][index(kVariantBits, w.bits)][index(kVariantGroups, groups)]
                       [w.offset != nullptr];
}

}  // namespace epiloq::ops::weight_only_mm
