#pragma once

// Expressions as CUTLASS 2.x epilogue visitor trees (SM75, SM80 and what follows in that style).
//
// The leaves are written here rather than taken from CUTLASS: its row broadcast cannot be a scalar at run time and
// needs aligned vectors, and its column broadcast keeps a whole tile's values in an array that the stream-K path
// indexes at run time, which puts it into local memory. These read what a step needs, element by element, through the
// cache.

#include "cutlass/cutlass.h"
#include "cutlass/epilogue/threadblock/fusion/visitors.hpp"
#include "epilogue/lower.h"

namespace epiloq::epilogue {
namespace sm80 {

template <class T>
struct LeafArguments {
  T const* ptr = nullptr;
  bool is_vector = true;
  T null_default = T(0);
  std::int64_t batch_stride = 0;
};

// Declarations of a node without workspace or shared memory.
template <class Arguments_>
struct NodeBase {
  using Arguments = Arguments_;
  using Params = Arguments;
  struct SharedStorage {};
  template <class ProblemShape>
  static constexpr Params to_underlying_arguments(ProblemShape const&, Arguments const& args, void*) {
    return args;
  }
  template <class ProblemShape>
  static std::size_t get_workspace_size(ProblemShape const&, Arguments const&) {
    return 0;
  }
  NodeBase() = default;
  CUTLASS_HOST_DEVICE NodeBase(Params const& p, SharedStorage const&) : params(&p) {}
  Params const* params = nullptr;
};

template <class ThreadMap, class T>
struct Row : NodeBase<LeafArguments<T>> {
  using NodeBase<LeafArguments<T>>::NodeBase;
  static constexpr int kVector = ThreadMap::kElementsPerAccess;
  static constexpr int kColumns = ThreadMap::Iterations::kColumn;

  template <class Coord>
  struct Callbacks : cutlass::epilogue::threadblock::EmptyCallbacks {
    CUTLASS_DEVICE Callbacks(Coord const& coord, int n, int batch, LeafArguments<T> const* p)
        : coord(coord), n(n), batch(batch), params(p) {}
    Coord coord;  // (VECTOR, COLUMN) -> (m, n)
    int n, batch;
    LeafArguments<T> const* params;
    cutlass::Array<T, kVector> values[kColumns];

    CUTLASS_DEVICE void begin_epilogue() {
      T const* const begin = params->ptr + batch * params->batch_stride;
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < kColumns; ++c) {
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < kVector; ++v) {
          int const column = cute::get<1>(coord(v, c));
          bool const read = params->ptr != nullptr && column < n;
          values[c][v] = read ? begin[params->is_vector ? column : 0] : params->null_default;
        }
      }
    }
    template <class Accumulator, int kFragment>
    CUTLASS_DEVICE auto visit(int, int, int column, int, cutlass::Array<Accumulator, kFragment> const&) {
      static_assert(kFragment == kVector);
      return values[column];
    }
  };

  template <class ProblemShape>
  CUTLASS_DEVICE auto get_callbacks(cutlass::gemm::GemmCoord tile, int thread, ProblemShape problem) {
    using cute::_;
    using cute::_0;
    auto coord = ThreadMap::partition(cute::make_identity_tensor(problem), thread, tile)(_, _, _0{}, _0{}, _0{}, _0{});
    return Callbacks<decltype(coord)>(coord, cute::get<1>(problem), tile.k(), this->params);
  }
};

template <class ThreadMap, class T>
struct Col : NodeBase<LeafArguments<T>> {
  using NodeBase<LeafArguments<T>>::NodeBase;
  template <class Coord>
  struct Callbacks : cutlass::epilogue::threadblock::EmptyCallbacks {
    CUTLASS_DEVICE Callbacks(Coord const& coord, int m, int batch, LeafArguments<T> const* p)
        : coord(coord), m(m), batch(batch), params(p) {}
    Coord coord;  // (ROW, STEP) -> (m, n)
    int m, batch;
    LeafArguments<T> const* params;
    static constexpr int kRows = decltype(cute::size<0>(std::declval<Coord>()))::value;
    T values[kRows];

    CUTLASS_DEVICE void begin_step(int step) {
      T const* const begin = params->ptr + batch * params->batch_stride;
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < kRows; ++r) {
        int const row = cute::get<0>(coord(r, step));
        bool const read = params->ptr != nullptr && row < m;
        values[r] = read ? begin[params->is_vector ? row : 0] : params->null_default;
      }
    }
    template <class Accumulator, int kFragment>
    CUTLASS_DEVICE auto visit(int, int row, int, int, cutlass::Array<Accumulator, kFragment> const&) {
      cutlass::Array<T, kFragment> fragment;
      fragment.fill(values[row]);
      return fragment;
    }
  };

  template <class ProblemShape>
  CUTLASS_DEVICE auto get_callbacks(cutlass::gemm::GemmCoord tile, int thread, ProblemShape problem) {
    using cute::_;
    using cute::_0;
    auto coord = cute::group_modes<1, 4>(
        ThreadMap::partition(cute::make_identity_tensor(problem), thread, tile)(_0{}, _0{}, _, _, _, _));
    return Callbacks<decltype(coord)>(coord, cute::get<0>(problem), tile.k(), this->params);
  }
};

// A node of one child with a functor that takes arguments, which CUTLASS 3.x's node supports but 2.x's does not.
template <template <class> class Fn, class In>
struct ComputeWith : NodeBase<typename Fn<In>::Arguments> {
  using Base = NodeBase<typename Fn<In>::Arguments>;
  using Base::Base;
  using typename Base::Params;

  struct Callbacks : cutlass::epilogue::threadblock::EmptyCallbacks {
    CUTLASS_DEVICE explicit Callbacks(Params const* p) : params(p) {}
    Params const* params;

    template <class Accumulator, int kFragment>
    CUTLASS_DEVICE auto visit(int, int, int, int, cutlass::Array<Accumulator, kFragment> const&,
                              cutlass::Array<In, kFragment> const& x) {
      return Fn<cutlass::Array<In, kFragment>>{}(x, *params);
    }
  };
  template <class ProblemShape>
  CUTLASS_DEVICE auto get_callbacks(cutlass::gemm::GemmCoord, int, ProblemShape) {
    return Callbacks(this->params);
  }
};

template <template <class> class Fn, class Out, class In>
struct ComputeOf {
  using type = cutlass::epilogue::threadblock::VisitorCompute<Fn, Out, In, cutlass::FloatRoundStyle::round_to_nearest>;
};
template <template <class> class Fn, class Out, class In>
  requires requires { typename Fn<In>::Arguments; }
struct ComputeOf<Fn, Out, In> {
  using type = ComputeWith<Fn, In>;
};

}  // namespace sm80

template <class ThreadMap>
struct Sm80 {
  template <class T>
  using RowNode = sm80::Row<ThreadMap, T>;
  template <class T>
  using ColNode = sm80::Col<ThreadMap, T>;
  template <class Node, class... Kids>
  using Tree = cutlass::epilogue::threadblock::Sm80EVT<Node, Kids...>;
  using AccNode = cutlass::epilogue::threadblock::VisitorAccFetch;
  template <template <class> class Fn, class Out, class In>
  using Compute = typename sm80::ComputeOf<Fn, Out, In>::type;

  template <class Leaf>
  static auto row_args(Leaf const& leaf) {
    using T = std::remove_cvref_t<decltype(leaf.null_default)>;
    return sm80::LeafArguments<T>{leaf.ptr, leaf.is_vector, leaf.null_default, leaf.batch_stride};
  }
  template <class Leaf>
  static auto col_args(Leaf const& leaf) {
    return row_args(leaf);
  }
};

}  // namespace epiloq::epilogue
