#pragma once

#include <cutlass/float8.h>

#include <type_traits>

#include "machine.h"

namespace cute {

template <int kValue>
using Int = std::integral_constant<int, kValue>;
using _32 = Int<32>;
using _64 = Int<64>;
template <class... Sizes>
struct Shape {};

// Between a warp's own requests the emulated wgmma has an order, and registers are poison until they are waited for.
inline void warpgroup_arrive() {}
template <class T>
void warpgroup_fence_operand(T&) {}
inline void warpgroup_commit_batch() { emulated::commit_products(); }
template <int kPending>
void warpgroup_wait() {
  emulated::wait_for_products(kPending);
}

namespace SM90::GMMA {

template <emulated::Element kElement_, int kColumns_>
struct Instruction {
  static constexpr emulated::Element kElement = kElement_;
  static constexpr int kColumns = kColumns_;
};
template <class T>
inline constexpr auto element_of = emulated::Element::kInt8;
template <>
inline constexpr auto element_of<cutlass::float_e4m3_t> = emulated::Element::kE4M3;
template <>
inline constexpr auto element_of<cutlass::float_e5m2_t> = emulated::Element::kE5M2;

template <class, class, class>
struct Selected;
template <class T, class Sum, int kColumns>
struct Selected<T, Sum, Shape<_64, Int<kColumns>, _32>> {
  using type = Instruction<element_of<T>, kColumns>;
};
template <class A, class B, class Sum, class Tile>
  requires std::is_same_v<A, B>
typename Selected<A, Sum, Tile>::type ss_op_selector() {
  return {};
}

}  // namespace SM90::GMMA
}  // namespace cute
