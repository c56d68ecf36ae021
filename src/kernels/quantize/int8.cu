// int8 quantisation of rows with a scale and, if asymmetric, a zero point, static or measured: q = round(x / scale) +
// azp. One CTA per row: one pass over rows that fit in registers, otherwise two.
//
// In this order: a row's range and its scale (measure), three equivalent ways to quantise a value (quantize_exactly,
// and two without divisions), the two kernels, and the choice between them (launch_typed).

#include <algorithm>

#include "core/cuda_check.h"
#include "epiloq/device.h"
#include "kernels/common/device_code.cuh"
#include "kernels/quantize/quantize.cuh"
#include "kernels/quantize/spread_launch.cuh"
#include "problems/quantizers/quantize_int8.h"

namespace epiloq::ops::quantize_int8 {
namespace {

__device__ Range merge_block(Range range) {
  __shared__ Range of_warp[kMaxThreads / 32];
  range = merge_lanes(range, 32);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = range;
  __syncthreads();
  int const lane = threadIdx.x % 32;
  return merge_lanes(lane < blockDim.x / 32 ? of_warp[lane] : empty(), 32);
}

struct Parameters {
  float scale;
  float azp;  // an integer
};

// The scale and zero point that map a row's range to [-127, 127], or [-128, 127] if asymmetric. Zero is included in an
// asymmetric range if the caller asks for it or the range is a single value.
__device__ Parameters measure(Range range, bool symmetric, bool range_includes_zero) {
  float const amax = max_nan(-range.lo, range.hi);
  if (!symmetric && (range_includes_zero || range.lo == range.hi)) range = merge(range, {0.f, 0.f});
  float const step = symmetric ? __fdiv_rn(amax, 127.f) : __fdiv_rn(range.hi - range.lo, 255.f);
  float const scale = step < kSmallestScale ? kSmallestScale : step;  // NaN stays NaN
  if (symmetric) return {scale, 0.f};
  float const azp = rintf(-128.f - __fdiv_rn(range.lo, scale));
  return {scale, azp == azp ? azp : 0.f};
}

// By the definition: divide, round ties to even, NaN becomes 0.
__device__ int quantize_exactly(float x, Parameters p) {
  float const rounded = rintf(__fdiv_rn(x, p.scale));
  float const shifted = (rounded == rounded ? rounded : 0.f) + p.azp;
  return static_cast<int>(fminf(fmaxf(shifted, -128.f), 127.f));
}

// Adding this to a float of magnitude below 2^22 rounds it to an integer, ties to even, in the low bits.
constexpr float kRound = 12582912.f;  // 1.5 * 2^23
constexpr int kRoundBits = 0x4b400000;

// The same values, unsaturated (`pack` saturates), without divisions: below 512, x times 1 / scale is within 1e-4 of
// x / scale, so both round alike unless x is that close to a tie, larger or NaN. If one of the vector is, all of it is
// divided.
__device__ __forceinline__ void quantize_any(float const (&x)[kVector], Parameters p, float inverse,
                                             int (&q)[kVector]) {
  int const shift = __float2int_rn(p.azp) - kRoundBits;
  bool certain = true;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    float const with_bits = fmaf(x[i], inverse, kRound), whole = with_bits - kRound;
    certain = certain && fabsf(fmaf(x[i], inverse, -whole)) < 0.4999f && fabsf(whole) < 512.f;
    q[i] = __float_as_int(with_bits) + shift;
  }
  if (!certain) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) q[i] = quantize_exactly(x[i], p);
  }
}

// The same if no quotient exceeds 255: each is correctly rounded without a check.
template <int kSteps>
__device__ __forceinline__ void quantize_small(float const (&x)[kVector], Parameters p, Divisor const& divisor,
                                               int (&q)[kVector]) {
  int const shift = __float2int_rn(p.azp) - kRoundBits;
#pragma unroll
  for (int i = 0; i < kVector; ++i) q[i] = __float_as_int(quotient<kSteps, true>(x[i], divisor) + kRound) + shift;
}

template <class T>
__device__ __forceinline__ void store_quantized(std::int8_t* target, Vector<T> const& values, Parameters p,
                                                Divisor const& divisor, bool is_small) {
  float x[kVector];
  int q[kVector];
  values.widen(x);
  if (is_small) {
    quantize_small<kExactSteps<T>>(x, p, divisor, q);
  } else {
    quantize_any(x, p, divisor.inverse, q);
  }
  *reinterpret_cast<uint2*>(target) = {pack(q[0], q[1], q[2], q[3]), pack(q[4], q[5], q[6], q[7])};
}

__device__ Parameters read_static(Problem const& p, int row) {
  int const i = p.per_row ? row : 0;
  return {p.scale[i], p.azp != nullptr ? static_cast<float>(p.azp[i]) : 0.f};
}

__device__ Parameters finish_dynamic(Problem const& p, int row, Range range) {
  Parameters const parameters = measure(range, p.azp == nullptr, p.range_includes_zero);
  if (threadIdx.x == 0) {
    p.scale[row] = parameters.scale;
    if (p.azp != nullptr) p.azp[row] = __float2int_rn(parameters.azp);
  }
  return parameters;
}

__device__ void zero_padding(Problem const& p, std::int8_t* q) {
  for (int c = p.cols + threadIdx.x; c < p.padded_cols; c += blockDim.x) q[c] = 0;
}

// Symmetric: only the largest magnitude counts.
template <class T, int kVectors>
__device__ __forceinline__ Range range_of_row(Problem const& p, Vector<T> const (&held)[kVectors]) {
  Range range = empty();
  float amax = 0.f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if ((v * blockDim.x + threadIdx.x) * kVector >= p.cols) continue;
    if (p.azp == nullptr) {
      amax = max_nan(amax, held[v].largest());
    } else {
      range = merge(range, held[v].range());
    }
  }
  if (p.azp != nullptr) return merge_block(range);
  amax = largest_of_block(amax);
  return {-amax, amax};
}

// One CTA per row, held in registers: one pass over memory.
template <class T, int kVectors>
__global__ void __launch_bounds__(kMaxThreads) one_pass(__grid_constant__ Problem const p) {
  pdl_wait();
  int const row = blockIdx.x;
  T const* const x = static_cast<T const*>(p.x) + row * p.stride_x;
  std::int8_t* const q = p.q + row * p.stride_q;
  Vector<T> held[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    int const column = (v * blockDim.x + threadIdx.x) * kVector;
    if (column < p.cols) held[v].load(x + column);
  }
  pdl_trigger_if_few();
  Parameters parameters;
  if (p.is_static) {
    parameters = read_static(p, row);
  } else {
    parameters = finish_dynamic(p, row, range_of_row(p, held));
  }
  pdl_trigger();  // not sooner: CTAs that wait would displace CTAs that read
  Divisor const divisor = divide_by(parameters.scale);
  // No quotient by a measured scale exceeds 255 if zero is in the range, as it is if symmetric.
  bool const is_small = divisor.in_range && !p.is_static && (p.azp == nullptr || p.range_includes_zero);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    int const column = (v * blockDim.x + threadIdx.x) * kVector;
    if (column < p.cols) store_quantized(q + column, held[v], parameters, divisor, is_small);
  }
  zero_padding(p, q);
}

// Rows that are too long for registers or unaligned: two passes, elementwise.
template <class T>
__global__ void __launch_bounds__(kMaxThreads) two_pass(__grid_constant__ Problem const p) {
  pdl_wait();
  int const row = blockIdx.x;
  T const* const x = static_cast<T const*>(p.x) + row * p.stride_x;
  std::int8_t* const q = p.q + row * p.stride_q;
  Parameters parameters;
  if (p.is_static) {
    parameters = read_static(p, row);
  } else {
    Range range = empty();
    for (int c = threadIdx.x; c < p.cols; c += blockDim.x) {
      float const value = static_cast<float>(x[c]);
      range = merge(range, {value, value});
    }
    parameters = finish_dynamic(p, row, merge_block(range));
  }
  pdl_trigger();
  for (int c = threadIdx.x; c < p.cols; c += blockDim.x) {
    q[c] = static_cast<std::int8_t>(quantize_exactly(static_cast<float>(x[c]), parameters));
  }
  zero_padding(p, q);
}

int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

template <class T>
void launch_typed(Problem const& p, int device, Stream stream) {
  auto const on_16_bytes = [](void const* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0; };
  constexpr int kElements = 16 / sizeof(T);
  bool const aligned = p.cols % kVector == 0 && p.stride_x % kElements == 0 && p.stride_q % kVector == 0 &&
                       on_16_bytes(p.x) && on_16_bytes(p.q);
  // The fewest vectors per thread that keep a CTA at its preferred size: few rows get many threads each, for latency;
  // many rows small CTAs, several per SM.
  struct Variant {
    int vectors;
    void (*kernel)(Problem);
  };
  constexpr Variant kVariants[] = {{1, one_pass<T, 1>}, {2, one_pass<T, 2>}, {4, one_pass<T, 4>}};
  int const preferred_threads = p.rows <= 2 * device_properties(device).sm_count ? kMaxThreads : 128;
  int const vectors = p.cols / kVector;
  Variant chosen = kVariants[2];
  for (Variant const& variant : kVariants) {
    if (vectors <= variant.vectors * preferred_threads) {
      chosen = variant;
      break;
    }
  }
  int threads = round_up(std::max(1, (vectors + chosen.vectors - 1) / chosen.vectors), 32);
  if (!aligned || threads > kMaxThreads) {
    chosen.kernel = two_pass<T>;
    threads = std::min(round_up(std::max(1, p.cols), 32), kMaxThreads);
  }
  launch_spread("launching epiloq.quantize_int8", chosen.kernel, p.rows, threads, stream, p);
}

}  // namespace

void launch(Problem const& problem, DType x, int device, Stream stream) {
  DeviceGuard const guard(device);
  switch (x) {
    case DType::kFloat16:
      return launch_typed<__half>(problem, device, stream);
    case DType::kBFloat16:
      return launch_typed<__nv_bfloat16>(problem, device, stream);
    default:
      return launch_typed<float>(problem, device, stream);
  }
}

}  // namespace epiloq::ops::quantize_int8
