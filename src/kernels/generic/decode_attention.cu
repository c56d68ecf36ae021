// Attention of one query token per sequence (flash decoding). A CTA multiplies the query heads of a key head, four at
// most, so that keys and values are read once. Lanes of a warp share a token's elements, 16 bytes each; groups of such
// tokens are interleaved over lanes, warps and the CTAs of a cluster. Each group keeps a running maximum, sum and
// output; these are merged by shuffles, in shared memory, and through DSMEM (SM90).

#include <cfloat>

#include "core/cuda_check.h"
#include "epiloq/device.h"
#include "kernels/common/device_code.cuh"
#include "kernels/common/ptx/cluster.cuh"
#include "problems/decode_attention.h"

namespace epiloq::ops::decode_attention {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kAtOnce = 4;  // tokens per group of lanes whose loads are in flight together

__device__ __forceinline__ void widen_pair(std::uint32_t bits, __half, float* out) {
  float2 const pair = __half22float2(*reinterpret_cast<__half2 const*>(&bits));
  out[0] = pair.x, out[1] = pair.y;
}
__device__ __forceinline__ void widen_pair(std::uint32_t bits, __nv_bfloat16, float* out) {
  out[0] = __uint_as_float(bits << 16), out[1] = __uint_as_float(bits & 0xffff0000u);
}

// 16 bytes of keys or values as floats.
template <class T, Kind kKind>
struct Chunk {
  static constexpr int kCount = kKind == Kind::kHalf ? 8 : 16;

  static __device__ __forceinline__ void widen(uint4 const& raw, float (&out)[kCount]) {
    std::uint32_t const words[] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kKind == Kind::kHalf) {
        widen_pair(words[i], T{}, out + 2 * i);
      } else if constexpr (kKind == Kind::kInt8) {
        // q + 128 as the mantissa of 2^23.
        std::uint32_t const shifted = words[i] ^ 0x80808080u;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          out[4 * i + j] = __uint_as_float(__byte_perm(shifted, 0x4b000000u, 0x7440 + j)) - 8388736.f;
        }
      } else {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          auto const pair = static_cast<__nv_fp8x2_storage_t>(words[i] >> 16 * j);
          float2 const values = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
          out[4 * i + 2 * j] = values.x, out[4 * i + 2 * j + 1] = values.y;
        }
      }
    }
  }
};

// 2^(part - whole) for maxima, of which the whole's is -infinity where no token has counted yet.
__device__ __forceinline__ float weight_of(float part, float whole) {
  return whole == -INFINITY ? 0.f : exp2f(part - whole);
}

struct State {
  float most, sum, unused[2];
};

template <class T, Kind kKind, int kWidth, int kHeads>
struct Attention {
  using P = Chunk<T, kKind>;
  static constexpr int kCount = P::kCount, kLanes = kWidth / kCount;  // lanes that share a token
  static constexpr int kGroups = 32 / kLanes;                         // tokens of a warp at a time
  static_assert(kLanes >= 4 && kLanes <= 32 && 32 % kLanes == 0);

  struct Shared {
    alignas(16) float of_warp[kWarps][kHeads][kWidth];
    alignas(16) float own[kHeads][kWidth];
    State warp_state[kWarps][kHeads], own_state[kHeads];
  };

  Problem const& p;
  int batch, key_head, first_head;  // the last of those that share the key head
  int chunk, of_warp;               // of a lane: which elements, and of which token
  float q[kHeads][kCount];
  float most[kHeads], sum[kHeads], out[kHeads][kCount];

  __device__ explicit Attention(Problem const& problem) : p(problem) {
    int const parts = (p.group + kHeads - 1) / kHeads;
    batch = blockIdx.z, key_head = blockIdx.y / parts, first_head = blockIdx.y % parts * kHeads;
    chunk = threadIdx.x % 32 % kLanes, of_warp = threadIdx.x % 32 / kLanes;
    constexpr float kLog2E = 1.44269504f;
    auto const* const query = static_cast<T const*>(p.query) + batch * p.of_query.batch + chunk * kCount;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      int const head = key_head * p.group + min(first_head + h, p.group - 1);
#pragma unroll
      for (int i = 0; i < kCount; i += 8) {
        uint4 const raw = *reinterpret_cast<uint4 const*>(query + head * p.of_query.head + i);
        float values[8];
        Chunk<T, Kind::kHalf>::widen(raw, values);
#pragma unroll
        for (int j = 0; j < 8; ++j) q[h][i + j] = values[j] * (p.scale * kLog2E);
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) out[h][i] = 0.f;
      most[h] = -INFINITY, sum[h] = 0.f;
    }
  }

  // Which of a group's kAtOnce tokens count, a bit each.
  __device__ __forceinline__ unsigned counting(int at, int last) const {
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int const token = at + i * kGroups + of_warp;
      bool const counts = token < last && (p.mask == nullptr || p.mask[batch * p.mask_batch + token] != 0);
      bits |= static_cast<unsigned>(counts) << i;
    }
    return bits;
  }

  // What is loaded of kAtOnce tokens.
  struct Tokens {
    uint4 key[kAtOnce], value[kAtOnce];
    float key_scale[kAtOnce], value_scale[kAtOnce];
  };

  __device__ __forceinline__ void load(Tokens& tokens, int at, unsigned counts) const {
    constexpr int kBytes = kKind == Kind::kHalf ? 2 : 1;
    auto const row = [&](void const* data, Strides const& s, int token) {
      auto const* const bytes = static_cast<std::uint8_t const*>(data);
      return __ldg(reinterpret_cast<uint4 const*>(
          bytes + (batch * s.batch + key_head * s.head + token * s.token) * kBytes + chunk * 16));
    };
    auto const scale = [&](void const* data, Strides const& s, int token) {
      return static_cast<float>(static_cast<T const*>(data)[batch * s.batch + key_head * s.head + token]);
    };
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int const token = at + i * kGroups + of_warp;
      tokens.key[i] = tokens.value[i] = uint4{};
      tokens.key_scale[i] = tokens.value_scale[i] = 1.f;
      if ((counts >> i & 1) == 0) continue;
      tokens.key[i] = row(p.key, p.of_key, token), tokens.value[i] = row(p.value, p.of_value, token);
      if constexpr (kKind != Kind::kHalf) {
        tokens.key_scale[i] = scale(p.key_scale, p.of_key_scale, token);
        tokens.value_scale[i] = scale(p.value_scale, p.of_value_scale, token);
      }
    }
  }

  __device__ __forceinline__ void add(Tokens const& tokens, unsigned counts) {
    float weight[kHeads][kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      float key[kCount];
      P::widen(tokens.key[i], key);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        float score = 0.f;
#pragma unroll
        for (int j = 0; j < kCount; ++j) score = fmaf(q[h][j], key[j], score);
#pragma unroll
        for (int lane = kLanes / 2; lane > 0; lane /= 2) score += __shfl_xor_sync(~0u, score, lane);
        weight[h][i] = counts >> i & 1 ? score * tokens.key_scale[i] : -INFINITY;
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float whole = most[h];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) whole = fmaxf(whole, weight[h][i]);
      float const kept = weight_of(most[h], whole);
      most[h] = whole, sum[h] *= kept;
#pragma unroll
      for (int j = 0; j < kCount; ++j) out[h][j] *= kept;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        float const exponential = weight_of(weight[h][i], whole);
        sum[h] += exponential;
        weight[h][i] = exponential * tokens.value_scale[i];
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      float value[kCount];
      P::widen(tokens.value[i], value);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) out[h][j] = fmaf(weight[h][i], value[j], out[h][j]);
      }
    }
  }

  // The groups of a warp as one.
  __device__ __forceinline__ void merge_groups() {
#pragma unroll
    for (int lane = kLanes; lane < 32; lane *= 2) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        float const other = __shfl_xor_sync(~0u, most[h], lane), whole = fmaxf(most[h], other);
        float const mine = weight_of(most[h], whole), others = weight_of(other, whole);
        most[h] = whole;
        sum[h] = sum[h] * mine + __shfl_xor_sync(~0u, sum[h], lane) * others;
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          out[h][j] = out[h][j] * mine + __shfl_xor_sync(~0u, out[h][j], lane) * others;
        }
      }
    }
  }

  __device__ __forceinline__ void put(Shared& shared) const {
    if (of_warp != 0) return;
    int const warp = threadIdx.x / 32;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) shared.of_warp[warp][h][chunk * kCount + j] = out[h][j];
      if (chunk == 0) shared.warp_state[warp][h] = {most[h], sum[h], {}};
    }
  }

  // Four elements of head h: numerators and the sum that divides them.
  struct Four {
    float values[4];
    float most, sum;
  };

  // `state(i)` and `values(i)` of the parts.
  template <class StateOf, class ValuesOf>
  static __device__ __forceinline__ Four merged(int parts, StateOf state, ValuesOf values) {
    Four whole{{0.f, 0.f, 0.f, 0.f}, -INFINITY, 0.f};
    for (int i = 0; i < parts; ++i) whole.most = fmaxf(whole.most, state(i).most);
    for (int i = 0; i < parts; ++i) {
      State const of_part = state(i);
      float const weight = weight_of(of_part.most, whole.most);
      float4 const four = values(i);
      whole.sum = fmaf(weight, of_part.sum, whole.sum);
      float const each[] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) whole.values[j] = fmaf(weight, each[j], whole.values[j]);
    }
    return whole;
  }

  // Where no token counts the result is 0.
  __device__ __forceinline__ void store(Four const& four, int h, int element) const {
    if (first_head + h >= p.group) return;
    std::int64_t const row = std::int64_t{batch} * p.key_heads * p.group + key_head * p.group + first_head + h;
    T* const to = static_cast<T*>(p.out) + row * kWidth + element;
#pragma unroll
    for (int j = 0; j < 4; ++j) to[j] = static_cast<T>(four.sum == 0.f ? 0.f : four.values[j] / four.sum);
  }
};

template <class T, Kind kKind, int kWidth, int kHeads>
__global__ __launch_bounds__(kThreads) void attention_kernel(__grid_constant__ Problem const p) {
  using A = Attention<T, kKind, kWidth, kHeads>;
  __shared__ typename A::Shared shared;
  constexpr int kFours = kHeads * kWidth / 4, kInRow = kWidth / 4;
  int const split = gridDim.x, rank = blockIdx.x, warp = threadIdx.x / 32;
  pdl_wait();
  A attention(p);
  int const share = (p.tokens + split - 1) / split, last = min(p.tokens, (rank + 1) * share);
  constexpr int kOfWarp = A::kGroups * kAtOnce, kStep = kWarps * kOfWarp;
  int at = rank * share + warp * kOfWarp;
  unsigned counts = attention.counting(at, last);
#pragma unroll 1
  for (; at < last; at += kStep) {
    // The mask a step ahead, so that loads do not wait for it. Where no token counts nothing is read.
    unsigned const next = attention.counting(at + kStep, last);
    if (__any_sync(~0u, counts != 0)) {
      typename A::Tokens tokens;
      attention.load(tokens, at, counts);
      attention.add(tokens, counts);
    }
    counts = next;
  }
  pdl_trigger();
  attention.merge_groups();
  attention.put(shared);
  __syncthreads();
  for (int i = threadIdx.x; i < kFours; i += kThreads) {
    int const h = i / kInRow, element = i % kInRow * 4;
    auto const four = A::merged(
        kWarps, [&](int of) { return shared.warp_state[of][h]; },
        [&](int of) { return *reinterpret_cast<float4 const*>(&shared.of_warp[of][h][element]); });
    if (split == 1) {
      attention.store(four, h, element);
      continue;
    }
    *reinterpret_cast<float4*>(&shared.own[h][element]) = {four.values[0], four.values[1], four.values[2],
                                                           four.values[3]};
    if (element == 0) shared.own_state[h] = {four.most, four.sum, {}};
  }
  if (split == 1) return;
  cluster_sync();
  for (int i = threadIdx.x * split + rank; i < kFours; i += kThreads * split) {
    int const h = i / kInRow, element = i % kInRow * 4;
    auto const four = A::merged(
        split,
        [&](int of) {
          uint4 const raw = load_dsmem(shared_address(&shared.own_state[h]), of);
          return State{__uint_as_float(raw.x), __uint_as_float(raw.y), {}};
        },
        [&](int of) {
          uint4 const raw = load_dsmem(shared_address(&shared.own[h][element]), of);
          return float4{__uint_as_float(raw.x), __uint_as_float(raw.y), __uint_as_float(raw.z), __uint_as_float(raw.w)};
        });
    attention.store(four, h, element);
  }
  cluster_sync();  // no CTA ends while another reads its sums
}

template <class T, Kind kKind, int kWidth, int kHeads>
void launch_kernel(Problem const& p, int split, Stream stream) {
  int const parts = (p.group + kHeads - 1) / kHeads;
  dim3 const grid(split, p.key_heads * parts, p.batches), cluster(split);
  cuda_check(launch_pdl_clusters(&attention_kernel<T, kKind, kWidth, kHeads>, grid, cluster, kThreads, 0, stream, p),
             "launching epiloq.decode_attention");
}

template <class T, Kind kKind, int kWidth>
void launch_width(Problem const& p, int split, Stream stream) {
  if constexpr (kWidth <= 128) {
    if (p.group == 1) return launch_kernel<T, kKind, kWidth, 1>(p, split, stream);
  }
  launch_kernel<T, kKind, kWidth, kHeadsPerCta>(p, split, stream);
}

template <class T, Kind kKind>
void launch_kind(Problem const& p, int split, Stream stream) {
  if (p.width == 64) return launch_width<T, kKind, 64>(p, split, stream);
  if (p.width == 128) return launch_width<T, kKind, 128>(p, split, stream);
  launch_width<T, kKind, 256>(p, split, stream);
}

template <class T>
void launch_typed(Problem const& p, Kind kind, int split, Stream stream) {
  if (kind == Kind::kInt8) return launch_kind<T, Kind::kInt8>(p, split, stream);
  if (kind == Kind::kFloat8) return launch_kind<T, Kind::kFloat8>(p, split, stream);
  launch_kind<T, Kind::kHalf>(p, split, stream);
}

}  // namespace

void launch(Problem const& problem, DType query, Kind kind, int split, int device, Stream stream) {
  DeviceGuard const guard(device);
  if (query == DType::kFloat16) return launch_typed<__half>(problem, kind, split, stream);
  launch_typed<__nv_bfloat16>(problem, kind, split, stream);
}

}  // namespace epiloq::ops::decode_attention
