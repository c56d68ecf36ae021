// Rotary embedding of query and key heads; keys and values are appended to a cache. A thread has an element of a head's
// first half, and the one of the second half that it is rotated with. Each product is rounded, as torch rounds it.

#include "core/cuda_check.h"
#include "epiloq/device.h"
#include "kernels/common/device_code.cuh"
#include "problems/decode_attention.h"

namespace epiloq::ops::decode_attention {
namespace {

constexpr int kThreads = 256;

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

template <class T>
__global__ __launch_bounds__(kThreads) void rotate_kernel(__grid_constant__ RotateProblem const p) {
  pdl_wait();
  pdl_trigger();
  int const half = p.width / 2, token = blockIdx.x % p.tokens, batch = blockIdx.x / p.tokens;
  std::int64_t const position = advance(p.position, p.tokens) + token;
  int const all = p.heads + 2 * p.key_heads;
  for (int i = blockIdx.y * kThreads + threadIdx.x; i < all * half; i += gridDim.y * kThreads) {
    int const head = i / half, element = i % half;
    T const* const from =
        static_cast<T const*>(p.from) + batch * p.of_from.batch + token * p.of_from.token + head * p.of_from.head;
    T first = from[element], second = from[element + half];
    if (head < p.heads + p.key_heads) {
      std::int64_t const angles = batch * p.angle_batch + std::int64_t{token} * p.width;
      T const *const cos = static_cast<T const*>(p.cos) + angles, *const sin = static_cast<T const*>(p.sin) + angles;
      T const x = first, y = second;
      first = rotated(x, cos[element], y, sin[element], -1.f);
      second = rotated(y, cos[element + half], x, sin[element + half], 1.f);
    }
    T* to = static_cast<T*>(p.query) + (std::int64_t{blockIdx.x} * p.heads + head) * p.width;
    if (head >= p.heads) {
      if (position >= p.length) __trap();  // as torch asserts
      bool const is_key = head < p.heads + p.key_heads;
      Strides const& s = is_key ? p.of_key : p.of_value;
      int const own = head - p.heads - (is_key ? 0 : p.key_heads);
      to = static_cast<T*>(is_key ? p.key : p.value) + batch * s.batch + own * s.head + position * s.token;
    }
    to[element] = first, to[element + half] = second;
  }
}

}  // namespace

void launch_rotate(RotateProblem const& p, DType dtype, int device, Stream stream) {
  DeviceGuard const guard(device);
  int const work = (p.heads + 2 * p.key_heads) * (p.width / 2);
  dim3 const grid(static_cast<unsigned>(p.batches * p.tokens), static_cast<unsigned>((work + kThreads - 1) / kThreads));
  auto* const kernel = dtype == DType::kFloat16    ? &rotate_kernel<__half>
                       : dtype == DType::kBFloat16 ? &rotate_kernel<__nv_bfloat16>
                                                   : &rotate_kernel<float>;
  cuda_check(launch_pdl(kernel, grid, kThreads, 0, stream, p), "launching epiloq.rotate_and_store");
}

}  // namespace epiloq::ops::decode_attention
