#pragma once

// Shared by the kernels that quantise to 8 bits: vectors of eight elements, ranges and largest magnitudes, exact
// division, packing.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/float8.h"
#include "kernels/common/device_code.cuh"

namespace epiloq {

constexpr int kVector = 8;  // elements per load and store
constexpr int kMaxThreads = 1024;

struct Int8 {
  static constexpr float kMax = 127.f;
};

// PDL trigger of a quantiser that has issued its loads: at once if there are at most as many CTAs as SMs, so that the
// following product may start; with more CTAs each waits for its row, as the product's CTAs would otherwise displace
// those that have not started.
//
// No quantiser triggers before its own pdl_wait: a kernel that starts after one then knows that everything before it
// has finished, and a layer's product need not wait for its weight (constant_b).
__device__ __forceinline__ void pdl_trigger_if_few() {
#if __CUDA_ARCH__ >= 900
  constexpr unsigned kFewBlocks = 128;
  asm volatile(
      "{\n"
      ".reg .pred few;\n"
      "setp.le.u32 few, %0, %1;\n"
      "@few griddepcontrol.launch_dependents;\n"
      "}" ::"r"(gridDim.x),
      "n"(kFewBlocks)
      : "memory");
#endif
}

struct Range {
  float lo, hi;
};

__device__ __forceinline__ Range empty() { return {__builtin_inff(), -__builtin_inff()}; }
__device__ __forceinline__ Range merge(Range a, Range b) { return {min_nan(a.lo, b.lo), max_nan(a.hi, b.hi)}; }

// Over `lanes` neighbours, a power of two; all lanes get the result.
__device__ __forceinline__ Range merge_lanes(Range range, int lanes) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    range = merge(range, {__shfl_xor_sync(~0u, range.lo, offset), __shfl_xor_sync(~0u, range.hi, offset)});
  }
  return range;
}

// The largest of `lanes` neighbours, a power of two; all lanes get it.
__device__ __forceinline__ float largest_of(float magnitude, int lanes) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    magnitude = max_nan(magnitude, __shfl_xor_sync(~0u, magnitude, offset));
  }
  return magnitude;
}

// Over a warp; magnitudes order as their bits do, NaN last.
__device__ __forceinline__ float largest_of_warp(float magnitude) {
#if __CUDA_ARCH__ >= 800
  return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(magnitude)));
#else
  return largest_of(magnitude, 32);
#endif
}

// Over a CTA of whole warps; all threads get it. Ends with reads of shared memory: synchronise before the next call.
__device__ __forceinline__ float largest_of_block(float magnitude) {
  __shared__ float of_warp[kMaxThreads / 32];
  int const thread = threadIdx.y * blockDim.x + threadIdx.x, warps = blockDim.x * blockDim.y / 32;
  magnitude = largest_of_warp(magnitude);
  if (thread % 32 == 0) of_warp[thread / 32] = magnitude;
  __syncthreads();
  return largest_of_warp(thread % 32 < warps ? of_warp[thread % 32] : 0.f);
}

template <class T>
struct TwoOf;
template <>
struct TwoOf<__half> {
  using type = __half2;
};
template <>
struct TwoOf<__nv_bfloat16> {
  using type = __nv_bfloat162;
};

template <class T>
struct Vector {
  alignas(16) T values[kVector];

  // 16 bytes at a time, bypassing L1, for what is read once.
  __device__ __forceinline__ void load(T const* source) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(values) / sizeof(int4)); ++i) {
      reinterpret_cast<int4*>(values)[i] = __ldcg(reinterpret_cast<int4 const*>(source) + i);
    }
  }
  __device__ __forceinline__ void load_cached(T const* source) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(values) / sizeof(int4)); ++i) {
      reinterpret_cast<int4*>(values)[i] = reinterpret_cast<int4 const*>(source)[i];
    }
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(values) / sizeof(int4)); ++i) {
      reinterpret_cast<int4*>(values)[i] = int4{};
    }
  }
  __device__ __forceinline__ void load_if(bool is_valid, T const* source) {
    if (is_valid) {
      load(source);
    } else {
      clear();
    }
  }
  __device__ __forceinline__ void store(T* target) const {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(values) / sizeof(int4)); ++i) {
      reinterpret_cast<int4*>(target)[i] = reinterpret_cast<int4 const*>(values)[i];
    }
  }
  // In FP32, rounded once.
  __device__ __forceinline__ void add(Vector const& other) {
    float sum[kVector], added[kVector];
    widen(sum);
    other.widen(added);
#pragma unroll
    for (int i = 0; i < kVector; ++i) values[i] = static_cast<T>(sum[i] + added[i]);
  }
  __device__ __forceinline__ void widen(float (&out)[kVector]) const {
#pragma unroll
    for (int i = 0; i < kVector; ++i) out[i] = static_cast<float>(values[i]);
  }
  __device__ __forceinline__ float largest() const;  // magnitude
  __device__ __forceinline__ Range range() const;
};

// One instruction per pair; separate conversions move the upper halves down first.
template <>
__device__ __forceinline__ void Vector<__nv_bfloat16>::widen(float (&out)[kVector]) const {
  auto const* const pairs = reinterpret_cast<unsigned const*>(values);
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) {
    out[2 * i] = __uint_as_float(pairs[i] << 16);
    out[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
  }
}

template <>
__device__ __forceinline__ float Vector<float>::largest() const {
  float result = fabsf(values[0]);
#pragma unroll
  for (int i = 1; i < kVector; ++i) result = max_nan(result, fabsf(values[i]));
  return result;
}
template <>
__device__ __forceinline__ Range Vector<float>::range() const {
  Range range{values[0], values[0]};
#pragma unroll
  for (int i = 1; i < kVector; ++i) range = merge(range, {values[i], values[i]});
  return range;
}
// Two at a time.
template <class T>
__device__ __forceinline__ float Vector<T>::largest() const {
  using Pair = typename TwoOf<T>::type;
  auto const* const pairs = reinterpret_cast<Pair const*>(values);
  Pair result = __habs2(pairs[0]);
#pragma unroll
  for (int i = 1; i < kVector / 2; ++i) result = __hmax2_nan(result, __habs2(pairs[i]));
  return static_cast<float>(__hmax_nan(result.x, result.y));
}
template <class T>
__device__ __forceinline__ Range Vector<T>::range() const {
  using Pair = typename TwoOf<T>::type;
  auto const* const pairs = reinterpret_cast<Pair const*>(values);
  Pair lo = pairs[0], hi = pairs[0];
#pragma unroll
  for (int i = 1; i < kVector / 2; ++i) {
    lo = __hmin2_nan(lo, pairs[i]);
    hi = __hmax2_nan(hi, pairs[i]);
  }
  return {static_cast<float>(__hmin_nan(lo.x, lo.y)), static_cast<float>(__hmax_nan(hi.x, hi.y))};
}

// Correction steps that make quotients of a type exact.
template <class T>
constexpr int kExactSteps = sizeof(T) == 2 ? 1 : 2;

template <class Format>
__device__ __forceinline__ unsigned pack(float a, float b, float c, float d) {
  return encode<Format>(a) | encode<Format>(b) << 8 | encode<Format>(c) << 16 | unsigned{encode<Format>(d)} << 24;
}
#if __CUDA_ARCH__ >= 890
#define EPILOQ_PACK(FORMAT, NAME)                                                                     \
  template <>                                                                                         \
  __device__ __forceinline__ unsigned pack<FORMAT>(float a, float b, float c, float d) {              \
    unsigned result;                                                                                  \
    asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite." NAME ".f32 low, %2, %1;\ncvt.rn.satfinite." NAME \
        ".f32 high, %4, %3;\nmov.b32 %0, {low, high};\n}"                                             \
        : "=r"(result)                                                                                \
        : "f"(a), "f"(b), "f"(c), "f"(d));                                                            \
    return result;                                                                                    \
  }
EPILOQ_PACK(E4M3, "e4m3x2")
EPILOQ_PACK(E5M2, "e5m2x2")
#undef EPILOQ_PACK
#endif
// Saturating.
__device__ __forceinline__ unsigned pack(int a, int b, int c, int d) {
  unsigned low, all;
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, 0;" : "=r"(low) : "r"(d), "r"(c));
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(all) : "r"(b), "r"(a), "r"(low));
  return all;
}
// NaN becomes 0.
template <>
__device__ __forceinline__ unsigned pack<Int8>(float a, float b, float c, float d) {
  return pack(__float2int_rn(a), __float2int_rn(b), __float2int_rn(c), __float2int_rn(d));
}

// Eight values over the divisor, as bytes.
template <class Format, int kSteps, bool kSmall = false>
__device__ __forceinline__ uint2 quantize(float (&x)[kVector], Divisor const& d) {
  if (d.in_range) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = quotient<kSteps, kSmall>(x[i], d);
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = __fdiv_rn(x[i], d.scale);
  }
  return {pack<Format>(x[0], x[1], x[2], x[3]), pack<Format>(x[4], x[5], x[6], x[7])};
}

}  // namespace epiloq
