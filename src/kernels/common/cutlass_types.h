#pragma once

// CUTLASS's types of DType's elements.

#include "cutlass/numeric_types.h"
#include "epiloq/tensor.h"

namespace epiloq {

template <DType>
struct CutlassTypeOf;
template <>
struct CutlassTypeOf<DType::kInt8> {
  using type = std::int8_t;
};
template <>
struct CutlassTypeOf<DType::kFloat8E4M3> {
  using type = cutlass::float_e4m3_t;
};
template <>
struct CutlassTypeOf<DType::kFloat8E5M2> {
  using type = cutlass::float_e5m2_t;
};
template <DType kDType>
using CutlassType = typename CutlassTypeOf<kDType>::type;

}  // namespace epiloq
