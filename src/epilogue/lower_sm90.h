#pragma once

// Expressions as CUTLASS 3.x epilogue visitor trees (SM90).

#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/sm90_visitor_compute_tma_warpspecialized.hpp"
#include "cutlass/epilogue/fusion/sm90_visitor_load_tma_warpspecialized.hpp"
#include "cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp"
#include "epilogue/lower.h"

namespace epiloq::epilogue {

template <class CtaTile>
struct Sm90 {
  // A bool stride makes a leaf a vector or a scalar at run time.
  using RowStride = cute::Stride<cute::_0, bool, std::int64_t>;
  using ColStride = cute::Stride<bool, cute::_0, std::int64_t>;
  template <class T>
  using RowBase = cutlass::epilogue::fusion::Sm90RowBroadcast<0, CtaTile, T, T, RowStride>;
  template <class T>
  using ColBase = cutlass::epilogue::fusion::Sm90ColBroadcast<0, CtaTile, T, T, ColStride>;

  // CUTLASS's broadcasts read a scalar in their constructors, to skip multiplications by zero. Under programmatic
  // dependent launch the kernel that writes the scalar may not have finished by then, so these do not read memory
  // before the main loop has waited for it.
  template <class T>
  struct RowNode : RowBase<T> {
    using Base = RowBase<T>;
    RowNode() = default;
    CUTLASS_HOST_DEVICE RowNode(typename Base::Params const& params, typename Base::SharedStorage const& storage)
        : Base() {
      this->params = params;
      this->smem = const_cast<T*>(storage.smem.data());
    }
  };
  template <class T>
  struct ColNode : ColBase<T> {
    using Base = ColBase<T>;
    ColNode() = default;
    CUTLASS_HOST_DEVICE ColNode(typename Base::Params const& params, typename Base::SharedStorage const&) : Base() {
      this->params = params;
      this->is_zero_ = false;
    }
  };

  template <class Node, class... Kids>
  using Tree = cutlass::epilogue::fusion::Sm90EVT<Node, Kids...>;
  using AccNode = cutlass::epilogue::fusion::Sm90AccFetch;
  template <template <class> class Fn, class Out, class In>
  using Compute = cutlass::epilogue::fusion::Sm90Compute<Fn, Out, In, cutlass::FloatRoundStyle::round_to_nearest>;

  template <class Leaf>
  static auto row_args(Leaf const& leaf) {
    return typename RowBase<std::remove_cvref_t<decltype(leaf.null_default)>>::Arguments{
        leaf.ptr, leaf.null_default, {cute::_0{}, leaf.is_vector, leaf.batch_stride}};
  }
  template <class Leaf>
  static auto col_args(Leaf const& leaf) {
    return typename ColBase<std::remove_cvref_t<decltype(leaf.null_default)>>::Arguments{
        leaf.ptr, leaf.null_default, {leaf.is_vector, cute::_0{}, leaf.batch_stride}};
  }
};

}  // namespace epiloq::epilogue
