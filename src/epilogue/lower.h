#pragma once

// The recursion that both generations of CUTLASS share: 2.x visitors derive from the 3.x visitor base, so a node's
// Arguments are its children's and then its own in either.

#include <bit>
#include <type_traits>

#include "cutlass/array.h"
#include "cutlass/functional.h"
#include "cutlass/numeric_conversion.h"
#include "epilogue/expr.h"

namespace epiloq::epilogue {

template <class Tag>
struct Function;
template <>
struct Function<Multiply> {
  template <class T>
  using type = cutlass::multiplies<T>;
};
template <>
struct Function<Divide> {
  template <class T>
  using type = cutlass::divides<T>;
};
template <>
struct Function<Subtract> {
  template <class T>
  using type = cutlass::minus<T>;
};
template <>
struct Function<MultiplyAdd> {
  template <class T>
  using type = cutlass::multiply_add<T>;
};

// CUTLASS copies a Half as its half_t, in either format. Functors that interpret it receive the tag at run time, as
// their Arguments.
template <class T>
using Element = std::conditional_t<std::is_same_v<T, Half>, cutlass::half_t, T>;
template <class T>
struct Widening {
  using Arguments = Widen;
};
template <int kSize>
struct Widening<cutlass::Array<cutlass::half_t, kSize>> {
  template <class T>
  using Values = cutlass::Array<T, kSize>;
  // One by one, so that values that are known to be equal, as a broadcast column's, are widened once.
  CUTLASS_DEVICE Values<float> operator()(Values<cutlass::half_t> const& x, Widen to) const {
    Values<float> wide;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kSize; ++i) {
      cutlass::half_t const half = x[i];
      float const of_float16 = static_cast<float>(half);
      float const of_bfloat16 = static_cast<float>(cutlass::bfloat16_t::bitcast(half.raw()));
      wide[i] = to.is_bfloat16 ? of_bfloat16 : of_float16;
    }
    return wide;
  }
};
template <class T>
struct Narrowing {
  using Arguments = Narrow;
};
template <int kSize>
struct Narrowing<cutlass::Array<float, kSize>> {
  template <class T>
  using Values = cutlass::Array<T, kSize>;
  CUTLASS_DEVICE Values<cutlass::half_t> operator()(Values<float> const& x, Narrow to) const {
    using cutlass::bfloat16_t, cutlass::half_t, cutlass::NumericArrayConverter;
    if (!to.is_bfloat16) return NumericArrayConverter<half_t, float, kSize>::convert(x);
    return std::bit_cast<Values<half_t>>(NumericArrayConverter<bfloat16_t, float, kSize>::convert(x));
  }
};
template <>
struct Function<Widen> {
  template <class T>
  using type = Widening<T>;
};
template <>
struct Function<Narrow> {
  template <class T>
  using type = Narrowing<T>;
};

// D^T = B^T A^T: a row of D is a column of D^T, so swapped operands need no second epilogue.
template <class Base>
struct Transposed : Base {
  template <class T>
  using RowNode = typename Base::template ColNode<T>;
  template <class T>
  using ColNode = typename Base::template RowNode<T>;
  template <class Leaf>
  static auto row_args(Leaf const& leaf) {
    return Base::col_args(leaf);
  }
  template <class Leaf>
  static auto col_args(Leaf const& leaf) {
    return Base::row_args(leaf);
  }
};

template <class Target, class Expr>
struct Lower;
template <class Target>
struct Lower<Target, Acc> {
  using type = typename Target::AccNode;
  static typename type::Arguments args(Acc) { return {}; }
};
template <class Target, class T>
struct Lower<Target, Row<T>> {
  using type = typename Target::template RowNode<Element<T>>;
  static typename type::Arguments args(Row<T> const& leaf) {
    return Target::row_args(Row<Element<T>>{reinterpret_cast<Element<T> const*>(leaf.ptr), leaf.is_vector,
                                            std::bit_cast<Element<T>>(leaf.null_default), leaf.batch_stride});
  }
};
template <class Target, class T>
struct Lower<Target, Col<T>> {
  using type = typename Target::template ColNode<T>;
  static typename type::Arguments args(Col<T> const& leaf) { return Target::col_args(leaf); }
};
template <class Target, class Tag, class Out, class In, class... Kids>
struct Lower<Target, Op<Tag, Out, In, Kids...>> {
  using Node = typename Target::template Compute<Function<Tag>::template type, Element<Out>, Element<In>>;
  using type = typename Target::template Tree<Node, typename Lower<Target, Kids>::type...>;
  static typename type::Arguments args(Op<Tag, Out, In, Kids...> const& op) {
    return std::apply(
        [&](auto const&... kid) {
          return typename type::Arguments{Lower<Target, Kids>::args(kid)..., own_args(op.tag)};
        },
        op.kids);
  }

 private:
  static typename Node::Arguments own_args(Tag tag) {
    if constexpr (std::is_empty_v<Tag>) {
      return {};
    } else {
      return tag;
    }
  }
};

}  // namespace epiloq::epilogue
