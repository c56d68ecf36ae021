#pragma once

// The recursion that both generations of CUTLASS share: 2.x visitors derive from the 3.x visitor base, so a node's
// Arguments are its children's and then its own in either.

#include "cutlass/functional.h"
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
  using type = typename Target::template RowNode<T>;
  static typename type::Arguments args(Row<T> const& leaf) { return Target::row_args(leaf); }
};
template <class Target, class T>
struct Lower<Target, Col<T>> {
  using type = typename Target::template ColNode<T>;
  static typename type::Arguments args(Col<T> const& leaf) { return Target::col_args(leaf); }
};
template <class Target, class Tag, class Out, class In, class... Kids>
struct Lower<Target, Op<Tag, Out, In, Kids...>> {
  using Node = typename Target::template Compute<Function<Tag>::template type, Out, In>;
  using type = typename Target::template Tree<Node, typename Lower<Target, Kids>::type...>;
  static typename type::Arguments args(Op<Tag, Out, In, Kids...> const& op) {
    return std::apply(
        [](auto const&... kid) { return typename type::Arguments{Lower<Target, Kids>::args(kid)..., {}}; }, op.kids);
  }
};

}  // namespace epiloq::epilogue
