#pragma once

// An expression's value at one element of D: on the host for tests, on the device for kernels written by hand.

#include <cmath>
#include <type_traits>

#include "core/half.h"
#include "epilogue/expr.h"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace epiloq::epilogue {

EPILOQ_HD inline float apply(MultiplyAdd, float a, float b, float c) { return fmaf(a, b, c); }
EPILOQ_HD inline double apply(MultiplyAdd, double a, double b, double c) { return ::fma(a, b, c); }
template <class T>
EPILOQ_HD T apply(Clamp, T x, T lo, T hi) {
  return x < lo ? lo : x > hi ? hi : x;
}
template <class T>
EPILOQ_HD T apply(Multiply, T a, T b) {
  return a * b;
}
template <class T>
EPILOQ_HD T apply(Divide, T a, T b) {
  return a / b;
}
template <class T>
EPILOQ_HD T apply(Subtract, T a, T b) {
  return a - b;
}
// The tensor cores' integers wrap; so do these, without the undefined behaviour of signed overflow.
EPILOQ_HD inline std::int32_t apply(Multiply, std::int32_t a, std::int32_t b) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(a) * static_cast<std::uint32_t>(b));
}
EPILOQ_HD inline std::int32_t apply(Subtract, std::int32_t a, std::int32_t b) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(a) - static_cast<std::uint32_t>(b));
}
EPILOQ_HD inline float apply(Widen to, Half x) {
#ifdef __CUDA_ARCH__
  return to.is_bfloat16 ? __bfloat162float(__ushort_as_bfloat16(x.bits)) : __half2float(__ushort_as_half(x.bits));
#else
  return to.is_bfloat16 ? float_of_bfloat16(x.bits) : float_of_float16(x.bits);
#endif
}
EPILOQ_HD inline Half apply(Narrow to, float x) {
#ifdef __CUDA_ARCH__
  return {to.is_bfloat16 ? __bfloat16_as_ushort(__float2bfloat16_rn(x)) : __half_as_ushort(__float2half_rn(x))};
#else
  return {to.is_bfloat16 ? bfloat16_of_float(x) : float16_of_float(x)};
#endif
}

// As CUTLASS converts: to int8 rounded to nearest, ties to even, and saturated, NaN to 0.
template <class Out, class T>
EPILOQ_HD Out converted(T value) {
  if constexpr (std::is_same_v<Out, std::int8_t> && std::is_same_v<T, float>) {
    float const bounded = fminf(fmaxf(value, -128.f), 127.f);
    return static_cast<Out>(value == value ? rintf(bounded) : 0.f);
  } else {
    return static_cast<Out>(value);
  }
}

// Sums are int32 of int8 products, float of float8 ones.
template <class Sum>
EPILOQ_HD Sum eval(Acc, Sum acc, std::int64_t, std::int64_t) {
  return acc;
}
template <class T, class Sum>
EPILOQ_HD T eval(Scalar<T> leaf, Sum, std::int64_t, std::int64_t) {
  return leaf.value;
}
template <class T, class Sum>
EPILOQ_HD T eval(Row<T> const& leaf, Sum, std::int64_t, std::int64_t n) {
  return leaf.ptr == nullptr ? leaf.null_default : leaf.ptr[leaf.is_vector ? n : 0];
}
template <class T, class Sum>
EPILOQ_HD T eval(Col<T> const& leaf, Sum, std::int64_t m, std::int64_t) {
  return leaf.ptr == nullptr ? leaf.null_default : leaf.ptr[leaf.is_vector ? m : 0];
}
template <class Sum, class Tag, class Out, class In, class... Kids>
EPILOQ_HD Out eval(Op<Tag, Out, In, Kids...> const& op, Sum acc, std::int64_t m, std::int64_t n) {
  return std::apply(
      [&](auto const&... kid) { return converted<Out>(apply(op.tag, static_cast<In>(eval(kid, acc, m, n))...)); },
      op.kids);
}

// The expression of one column of D, whose values are read here, once: for kernels that go down a column.
template <class Leaf>
EPILOQ_HD Leaf at_column(Leaf leaf, std::int64_t) {
  return leaf;
}
template <class T>
EPILOQ_HD Scalar<T> at_column(Row<T> const& leaf, std::int64_t n) {
  return {eval(leaf, 0, 0, n)};
}
template <class Tag, class Out, class In, class... Kids>
EPILOQ_HD auto at_column(Op<Tag, Out, In, Kids...> const& op, std::int64_t n) {
  return std::apply(
      [&](auto const&... kid) {
        return Op<Tag, Out, In, decltype(at_column(kid, n))...>{{at_column(kid, n)...}, op.tag};
      },
      op.kids);
}

}  // namespace epiloq::epilogue
