#pragma once

// Epilogue of the int8 convolution, for neighbouring output channels of any number of pixels.
//
// int8 output is defined in float64. float32 gives the same unless the value is so close to a tie that rounding errors
// matter: they are at most 2^-24 of the scaled sum, which is at most |value| + |bias|, and 2^-24 of the value, and
// values beyond 2^8 saturate. One comparison finds the few that need the float64 path.

#include "epilogue/eval.h"
#include "epilogue/library.h"
#include "kernels/common/device_code.cuh"
#include "problems/conv2d_int8.h"

namespace epiloq::ops::conv2d_int8 {

template <class Real>
EPILOQ_HD auto restored(Finish const& f) {
  return epilogue::Restored::make<Real>(f.scale, f.scale_is_vector, f.bias, f.lo, f.hi);
}

// Initial value of the sums: acc - correction is then exact, or wraps to the right value.
__device__ __forceinline__ int first_sum(Finish const& f, int n) {
  return f.correction == nullptr ? 0 : static_cast<int>(0u - static_cast<unsigned>(f.correction[n]));
}

// Parameters of kCount channels from the nth on, shared by their pixels; `count` of them exist, at least one.
template <class Out, int kCount>
struct Channels {
  using Expr = decltype(epilogue::at_column(restored<float>({}), 0));
  Expr expr[kCount];

  __device__ __forceinline__ Channels(Finish const& f, int n, int count) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) expr[i] = epilogue::at_column(restored<float>(f), n + min(i, count - 1));
  }
  // Returns whether the outputs are certain.
  __device__ __forceinline__ bool finish(Out (&out)[kCount], int const (&sums)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) out[i] = static_cast<Out>(epilogue::eval(expr[i], sums[i], 0, 0));
    return true;
  }
};

template <int kCount>
struct Channels<std::int8_t, kCount> {
  float scale[kCount], bias[kCount];
  float lo, hi;
  float doubt;    // distance from a tie below which float32 may be wrong
  float integer;  // 1.5 * 2^23 + output_zero: its sum with a value has the output in the low bits

  __device__ __forceinline__ Channels(Finish const& f, int n, int count) : doubt(0.f) {
    float const least = -128.f - f.output_zero, most = 127.f - f.output_zero;
    lo = fminf(fmaxf(f.lo, least), most);
    hi = fminf(fmaxf(f.hi, least), most);
    integer = 12582912.f + f.output_zero;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      int const channel = n + min(i, count - 1);
      scale[i] = f.scale[f.scale_is_vector ? channel : 0];
      bias[i] = f.bias == nullptr ? 0.f : f.bias[channel];
      float const enough = fmaf(0x1p-22f, fabsf(bias[i]), 0x1p-14f);
      // Infinities and NaN are always in doubt.
      doubt = fmaxf(doubt, enough < 1.f && fabsf(scale[i]) < __int_as_float(0x7f800000) ? enough : 1.f);
    }
  }

  // The output in the low bits, and the distance from the value to it.
  struct Rounded {
    float sum, error;
  };
  __device__ __forceinline__ Rounded rounded(int i, int value) const {
    float const r = fminf(fmaxf(fmaf(scale[i], static_cast<float>(value), bias[i]), lo), hi);
    float const sum = __fadd_rn(r, integer);
    return {sum, fabsf(__fsub_rn(r, __fsub_rn(sum, integer)))};
  }

  __device__ __forceinline__ bool finish(std::int8_t (&out)[kCount], int const (&sums)[kCount]) const {
    float farthest = 0.f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      Rounded const one = rounded(i, sums[i]);
      farthest = fmaxf(farthest, one.error);
      out[i] = static_cast<std::int8_t>(__float_as_int(one.sum));
    }
    return farthest + doubt < 0.5f;
  }

  // One bit per output that is in doubt.
  __device__ __forceinline__ unsigned doubtful(int const (&sums)[kCount]) const {
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) bits |= (rounded(i, sums[i]).error + doubt < 0.5f ? 0u : 1u) << i;
    return bits;
  }
};

// An int8 output by the definition. NaN counts as 0.
__device__ inline std::int8_t exact(Finish const& f, int n, int sum) {
  double const r = epilogue::eval(restored<double>(f), sum, 0, n);
  double const clamped = r == r ? r : epilogue::apply(epilogue::Clamp{}, 0., double{f.lo}, double{f.hi});
  int const rounded = __double2int_rn(fmin(fmax(clamped, -256.), 256.));
  return static_cast<std::int8_t>(min(max(rounded + f.output_zero, -128), 127));
}

// `whole`: all channels exist, and `to` is aligned for a vector store.
template <class Out, int kCount>
__device__ __forceinline__ void store(Out* to, Out const (&values)[kCount], int count, bool whole) {
  constexpr int kBytes = kCount * static_cast<int>(sizeof(Out));
  using Vector = std::conditional_t<kBytes % 16 == 0, uint4, std::conditional_t<kBytes == 8, uint2, unsigned>>;
  if constexpr (kBytes >= 4) {
    if (whole) {
#pragma unroll
      for (int i = 0; i < kBytes / static_cast<int>(sizeof(Vector)); ++i) {
        reinterpret_cast<Vector*>(to)[i] = reinterpret_cast<Vector const*>(values)[i];
      }
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i < count) to[i] = values[i];
  }
}

}  // namespace epiloq::ops::conv2d_int8
