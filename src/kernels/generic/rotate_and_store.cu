// Rotary embedding of query and key heads, which may be normed before; keys and values are appended to a cache. A warp
// has a head, a lane elements of its first half and those of the second half that they are rotated with. The norm is
// rounded once; then each product is rounded, as torch rounds it.

#include "core/cuda_check.h"
#include "epiloq/device.h"
#include "kernels/common/device_code.cuh"
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
  T* to = static_cast<T*>(p.query) + (std::int64_t{blockIdx.x} * p.heads + head) * p.width;
  if (!is_query) {
    if (position >= p.length) __trap();  // as torch asserts
    Strides const& s = is_value ? p.of_value : p.of_key;
    int const own = head - p.heads - (is_value ? p.key_heads : 0);
    to = static_cast<T*>(is_value ? p.value : p.key) + batch * s.batch + own * s.head + position * s.token;
  }
  std::int64_t const angles = batch * p.angle_batch + std::int64_t{token} * p.width;
  T const *const cos = static_cast<T const*>(p.cos) + angles, *const sin = static_cast<T const*>(p.sin) + angles;
  auto const element_at = [&](int i) {
    if (factor == nullptr) return from[i];
    return static_cast<T>(static_cast<float>(from[i]) * inverse * static_cast<float>(factor[i]));
  };
  for (int i = threadIdx.x % kLanes; i < half; i += kLanes) {
    T first = element_at(i), second = element_at(i + half);
    if (!is_value) {
      T const x = first, y = second;
      first = rotated(x, cos[i], y, sin[i], -1.f);
      second = rotated(y, cos[i + half], x, sin[i + half], 1.f);
    }
    to[i] = first, to[i + half] = second;
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
