#pragma once

// Kernels of a table by what they are compiled for. A Family has kRows, a type Launch, and launch<row, type of x, bits,
// scale groups per K step, offsets>(), null if this build lacks the kernel.

#include <array>
#include <utility>

#include "problems/weight_only.h"

namespace epiloq::ops::weight_only_mm {

// A row's kernels by type, bits, scale groups per K step, and offsets.
template <class Launch>
using ByGroups = std::array<std::array<Launch, 2>, 3>;
template <class Launch>
using Variants = std::array<std::array<ByGroups<Launch>, 2>, 2>;

template <class Family, int kRow, DType kX, int kBits>
constexpr ByGroups<typename Family::Launch> by_groups() {
  return {
      {{Family::template launch<kRow, kX, kBits, 1, false>(), Family::template launch<kRow, kX, kBits, 1, true>()},
       {Family::template launch<kRow, kX, kBits, 2, false>(), Family::template launch<kRow, kX, kBits, 2, true>()},
       {Family::template launch<kRow, kX, kBits, 4, false>(), Family::template launch<kRow, kX, kBits, 4, true>()}}};
}

template <class Family, int... kRows>
constexpr std::array<Variants<typename Family::Launch>, sizeof...(kRows)> table(std::integer_sequence<int, kRows...>) {
  return {Variants<typename Family::Launch>{
      {{by_groups<Family, kRows, DType::kFloat16, 4>(), by_groups<Family, kRows, DType::kFloat16, 8>()},
       {by_groups<Family, kRows, DType::kBFloat16, 4>(), by_groups<Family, kRows, DType::kBFloat16, 8>()}}}...};
}

template <class Family>
constexpr auto kTable = table<Family>(std::make_integer_sequence<int, Family::kRows>{});

// Null if this build lacks the kernel.
template <class Family>
typename Family::Launch variant_of(int row, DType x, Weight const& w) {
  int const groups = w.group == 32 ? 2 : w.group == 64 ? 1 : 0;
  return kTable<Family>[row][x == DType::kBFloat16][w.bits == 8][groups][w.offset != nullptr];
}

}  // namespace epiloq::ops::weight_only_mm
