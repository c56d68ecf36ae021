// Rotary embedding of query and key heads, which may be normed before; keys and values are appended to a cache, whose
// elements may have 8 bits. A warp has a head, a lane elements of its first half and those of the second half that they
// are rotated with. The norm is rounded once; then each product is rounded, as torch rounds it.

#include <cfloat>

#include "core/cuda_check.h"
#include "epiloq/device.h"
#include "kernels/common/device_code.cuh"
#include "kernels/quantize/quantize.cuh"
#include "problems/decode_attention.h"

namespace epiloq::ops::decode_attention {
namespace {

constexpr int kWarps = 8, kLanes = 32, kThreads = kWarps * kLanes;

// 1 / the root mean square of a head, by a warp.
template <class T>
__device__ __forceinline__ float inverse_size(T const* head, int width, float epsilon) {
  float sum = 0;
  for (int element = threadIdx.x % kLanes; element < width; element += kLanes) {
    float const value = static_cast<float>(head[element]);
    sum = fmaf(value, value, sum);
  }
#pragma unroll
  for (int apart = kLanes / 2; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
  return rsqrtf(sum / static_cast<float>(width) + epsilon);
}

template <class T>
__device__ __forceinline__ T rotated(T x, T cos, T other, T sin, float sign) {
  T const a = static_cast<T>(__fmul_rn(static_cast<float>(x), static_cast<float>(cos)));
  T const b = static_cast<T>(__fmul_rn(sign * static_cast<float>(other), static_cast<float>(sin)));
  return static_cast<T>(__fadd_rn(static_cast<float>(a), static_cast<float>(b)));
}

// Returns the first token's position and adds the number of tokens to it. CTAs count themselves in its upper half; the
// lower half is the position until the last CTA, when all have read it, stores the sum.
__device__ __forceinline__ std::int64_t advance(std::int64_t* position, int tokens) {
  if (position == nullptr) return 0;
  constexpr int kCountedFrom = 32;
  unsigned const ctas = gridDim.x * gridDim.y;
  std::uint64_t const read = *static_cast<std::uint64_t volatile*>(static_cast<void*>(position));
  if (read >> kCountedFrom >= ctas) __trap();  // neither a position nor a count
  std::int64_t const first = static_cast<std::uint32_t>(read);
  __syncthreads();  // all threads have read it
  if (threadIdx.x == 0) {
    auto* const counted = reinterpret_cast<unsigned long long*>(position);
    if (atomicAdd(counted, 1ull << kCountedFrom) >> kCountedFrom == ctas - 1) *position = first + tokens;
  }
  return first;
}

// Scale of a head, as quantize_heads (cached_heads.py) has it. NaN stays NaN.
template <class T>
__device__ __forceinline__ T scale_of(float largest, float most) {
  float scale = __fdiv_rn(largest, most), smallest = FLT_MIN;
  if constexpr (std::is_same_v<T, __half>) {
    constexpr float kSmallest = 0x1p-24f;  // half a step more rounds up
    scale += kSmallest / 2, smallest = kSmallest;
  }
  T const rounded = static_cast<T>(scale);
  return static_cast<float>(rounded) < smallest ? static_cast<T>(smallest) : rounded;
}

template <class T, class Factor>
__global__ __launch_bounds__(kThreads) void rotate_kernel(__grid_constant__ RotateProblem const p) {
  pdl_wait();
  pdl_trigger();
  int const half = p.width / 2, token = blockIdx.x % p.tokens, batch = blockIdx.x / p.tokens;
  std::int64_t const position = advance(p.position, p.tokens) + token;
  int const head = blockIdx.y * kWarps + threadIdx.x / kLanes;
  if (head >= p.heads + 2 * p.key_heads) return;
  bool const is_query = head < p.heads, is_value = head >= p.heads + p.key_heads;
  T const* const from =
      static_cast<T const*>(p.from) + batch * p.of_from.batch + token * p.of_from.token + head * p.of_from.head;
  auto const* const factor = is_value ? nullptr : static_cast<Factor const*>(is_query ? p.query_norm : p.key_norm);
  float const inverse = factor != nullptr ? inverse_size(from, p.width, p.epsilon) : 1.f;
  if (!is_query && position >= p.length) __trap();  // as torch asserts
  std::int64_t const angles = batch * p.angle_batch + std::int64_t{token} * p.angle_width;
  T const *const cos = static_cast<T const*>(p.cos) + angles, *const sin = static_cast<T const*>(p.sin) + angles;
  int const second = p.angle_width - half;  // where the angles of a head's second half are
  auto const element_at = [&](int i) {
    if (factor == nullptr) return from[i];
    return static_cast<T>(static_cast<float>(from[i]) * inverse * static_cast<float>(factor[i]));
  };
  struct Pair {
    T first, second;
  };
  auto const pair_at = [&](int i) -> Pair {
    T const x = element_at(i), y = element_at(i + half);
    if (is_value) return {x, y};
    return {rotated(x, cos[i], y, sin[i], -1.f), rotated(y, cos[i + second], x, sin[i + second], 1.f)};
  };
  auto const store = [&](T* to) {
    for (int i = threadIdx.x % kLanes; i < half; i += kLanes) {
      Pair const pair = pair_at(i);
      to[i] = pair.first, to[i + half] = pair.second;
    }
  };
  if (is_query) return store(static_cast<T*>(p.query) + (std::int64_t{blockIdx.x} * p.heads + head) * p.width);
  int const own = head - p.heads - (is_value ? p.key_heads : 0);
  auto const place = [&](Strides const& s) { return batch * s.batch + own * s.head + position * s.token; };
  void* const cache = is_value ? p.value : p.key;
  std::int64_t const in_cache = place(is_value ? p.of_value : p.of_key);
  if (p.kind == Kind::kHalf) return store(static_cast<T*>(cache) + in_cache);

  float largest = 0;
  for (int i = threadIdx.x % kLanes; i < half; i += kLanes) {
    Pair const pair = pair_at(i);
    for (T const x : {pair.first, pair.second}) largest = max_nan(largest, fabsf(static_cast<float>(x)));
  }
  bool const is_int8 = p.kind == Kind::kInt8;
  T const scale = scale_of<T>(largest_of_warp(largest), is_int8 ? Int8::kMax : E4M3::kMax);
  if (threadIdx.x % kLanes == 0) {
    static_cast<T*>(is_value ? p.value_scale : p.key_scale)[place(is_value ? p.of_value_scale : p.of_key_scale)] =
        scale;
  }
  auto const byte_of = [&](T x) {
    float const q = __fdiv_rn(static_cast<float>(x), static_cast<float>(scale));
    return static_cast<std::uint8_t>(is_int8 ? pack<Int8>(q, 0, 0, 0) : pack<E4M3>(q, 0, 0, 0));
  };
  auto* const to = static_cast<std::uint8_t*>(cache) + in_cache;
  for (int i = threadIdx.x % kLanes; i < half; i += kLanes) {
    Pair const pair = pair_at(i);
    to[i] = byte_of(pair.first), to[i + half] = byte_of(pair.second);
  }
}

template <class T>
auto* kernel_of(RotateProblem const& p) {
  return p.has_float_norms ? &rotate_kernel<T, float> : &rotate_kernel<T, T>;
}

}  // namespace

void launch_rotate(RotateProblem const& p, DType dtype, int device, Stream stream) {
  DeviceGuard const guard(device);
  int const heads = p.heads + 2 * p.key_heads;
  dim3 const grid(static_cast<unsigned>(p.batches * p.tokens), static_cast<unsigned>((heads + kWarps - 1) / kWarps));
  auto* const kernel = dtype == DType::kFloat16    ? kernel_of<__half>(p)
                       : dtype == DType::kBFloat16 ? kernel_of<__nv_bfloat16>(p)
                                                   : kernel_of<float>(p);
  cuda_check(launch_pdl(kernel, grid, kThreads, 0, stream, p), "launching epiloq.rotate_and_store");
}

}  // namespace epiloq::ops::decode_attention
