#pragma once

// Attention of one query token per sequence (flash decoding) on tensor cores.
//
// A CTA multiplies up to eight query heads of a key head, so that keys and values are read once for all of them. The
// warps of all CTAs of a split take steps of 16 tokens round-robin, so that a masked end of a cache leaves no CTA idle.
// Each warp has its own pipeline of shared-memory stages (cp.async), so that the main loop has no CTA barrier, and uses
// mma.sync m16n8k16: scores = queries (8 heads x D) * keys (D x 8 tokens, twice), output = values (D x 16 tokens) *
// weights (16 tokens x 8 heads). A lane's scores are then, without an exchange, its weights. Columns of D may come in
// any order as long as keys and queries agree, and rows of values as long as the output is stored accordingly: a lane
// therefore reads whole chunks of a row.
//
// Weights are rounded to the sum of two 16-bit floats; 8-bit keys and values are exact as float16. Partial results of a
// CTA's warps are merged in shared memory, those of a split's CTAs through DSMEM (SM90) or by a second kernel.

#include <cfloat>
#include <climits>

#include "kernels/common/device_code.cuh"
#include "kernels/common/ptx/cluster.cuh"
#include "kernels/common/ptx/cta.cuh"
#include "kernels/common/ptx/exp2.cuh"
#include "kernels/common/ptx/ldmatrix.cuh"
#include "kernels/common/w4a16/convert.cuh"
#include "kernels/generic/attention/merge.cuh"
#include "problems/decode_attention.h"

namespace epiloq::ops::decode_attention {

using weight_only_mm::mma;
using Word = std::uint32_t;

constexpr int kStep = 16;  // tokens of a stage
constexpr int kMaxStages = 8;

// Compile-time shape and shared-memory layout; `Operand` is the type that tensor cores multiply.
template <class T, Kind kKind, int kWidth>
struct Layout {
  using Operand = std::conditional_t<kKind == Kind::kHalf, T, __half>;
  static constexpr bool kHasScales = kKind != Kind::kHalf;
  static constexpr int kRow = kWidth * (kHasScales ? 1 : 2);  // bytes of a token's keys or values
  static constexpr int kChunks = kRow / 16;                   // 16-byte chunks of a token
  static constexpr int kKeyParts = kChunks / 4;               // chunks of a token's keys that a lane multiplies
  static constexpr int kKeyBytes = kStep * kRow, kStageBytes = 2 * kKeyBytes;
  static constexpr int kPipelineBytes = kStageBytes > 4096 ? 3 * kStageBytes : 12288, kWarps = 98304 / kPipelineBytes;
  static constexpr int kStages = kPipelineBytes / kStageBytes < kMaxStages ? kPipelineBytes / kStageBytes : kMaxStages;
  static constexpr int kThreads = 32 * kWarps;
  static_assert(kStages >= 3 && kStageBytes % 1024 == 0);

  // Offset in a stage of chunk k of token t, so that neither copying a row nor reading what a lane multiplies has bank
  // conflicts. Keys: lane (row, column) multiplies chunks 4 j + column of tokens row and row + 8. Values: ldmatrix
  // reads the same chunk of eight tokens.
  static __device__ constexpr int key_slot(int t, int k) {
    return (t / 8 * kKeyParts + k / 4) * 512 + (t % 8 ^ k / 4) * 64 + k % 4 * 16;
  }
  static __device__ constexpr int value_slot(int t, int k) {
    return t * kRow + (k ^ (kRow == 64 ? t / 2 % 4 : t % 8)) * 16;
  }
};

// A stage's metadata.
struct StageState {
  alignas(4) std::uint16_t scale[2 * kStep];  // of keys, then of values
  Word valid;                                 // a bit per unmasked token; 0: there are no more steps
};

__device__ __forceinline__ Word bits_of(__half2 pair) { return *reinterpret_cast<Word*>(&pair); }
__device__ __forceinline__ Word bits_of(__nv_bfloat162 pair) { return *reinterpret_cast<Word*>(&pair); }
__device__ __forceinline__ Word pack(float a, float b, __half) { return bits_of(__floats2half2_rn(a, b)); }
__device__ __forceinline__ Word pack(float a, float b, __nv_bfloat16) { return bits_of(__floats2bfloat162_rn(a, b)); }
__device__ __forceinline__ float2 unpack(Word pair, __half) {
  return __half22float2(*reinterpret_cast<__half2 const*>(&pair));
}
__device__ __forceinline__ float2 unpack(Word pair, __nv_bfloat16) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

// Four 8-bit numbers as float16, exactly: neighbours as pairs, or, at a distance of 2, the first with the third.
template <Kind kKind, int kDistance = 1>
__device__ __forceinline__ void widen(Word four, Word (&pairs)[2]) {
  if constexpr (kKind == Kind::kInt8) {
    // q + 128 as the low mantissa bits of 1024.
    Word const shifted = four ^ 0x80808080u;
    __half2 const offset = __half2half2(__ushort_as_half(0x6480));  // 1152
    constexpr Word kBytes[] = {kDistance == 1 ? 0x4140 : 0x4240, kDistance == 1 ? 0x4342 : 0x4341};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Word const raised = __byte_perm(shifted, 0x64646464u, kBytes[i]);
      pairs[i] = bits_of(__hsub2(*reinterpret_cast<__half2 const*>(&raised), offset));
    }
  } else {
    Word const ordered = kDistance == 1 ? four : __byte_perm(four, 0, 0x3120);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      auto const pair = static_cast<__nv_fp8x2_storage_t>(ordered >> 16 * i);
      pairs[i] = bits_of(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
    }
  }
}

// Iterates over a warp's steps that have an unmasked token. Masks of 32 steps are read at a time, one step per lane.
class Steps {
 public:
  __device__ Steps(Problem const& p, int first, int stride)
      : mask_(p.mask == nullptr ? nullptr : p.mask + blockIdx.z * p.mask_batch),
        tokens_(p.tokens),
        next_(first),
        stride_(stride) {}

  // Returns the next step's first token, and a bit for each unmasked token: 0 if there is no step left.
  __device__ __forceinline__ int advance(Word& valid) {
    while (remaining_ == 0) {
      if (next_ >= (tokens_ + kStep - 1) / kStep) {
        valid = 0;
        return 0;
      }
      read_window();
    }
    int const lane = __ffs(static_cast<int>(remaining_)) - 1;
    remaining_ &= remaining_ - 1;
    valid = __shfl_sync(~0u, valid_, lane);
    return (window_ + lane * stride_) * kStep;
  }

 private:
  __device__ __forceinline__ void read_window() {
    window_ = next_;
    std::int64_t const step = window_ + std::int64_t{stride_} * (threadIdx.x % 32), token = step * kStep;
    int const count = token >= tokens_ ? 0 : static_cast<int>(min(std::int64_t{kStep}, tokens_ - token));
    valid_ = (1u << count) - 1;
    if (mask_ != nullptr && count != 0) valid_ &= mask_bits(mask_ + token, count);
    remaining_ = __ballot_sync(~0u, valid_ != 0);
    next_ = static_cast<int>(min(window_ + std::int64_t{stride_} * 32, std::int64_t{INT_MAX}));
  }
  static __device__ __forceinline__ Word mask_bits(std::uint8_t const* from, int count) {
    Word bits = 0;
    if (count == kStep && reinterpret_cast<std::uintptr_t>(from) % 16 == 0) {
      uint4 const raw = *reinterpret_cast<uint4 const*>(from);
      Word const words[] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // moves bits 0, 8, 16 and 24 to 28 … 31
        bits |= ((__vcmpne4(words[i], 0) & 0x01010101u) * 0x10204080u >> 28) << 4 * i;
      }
      return bits;
    }
#pragma unroll
    for (int i = 0; i < kStep; ++i) bits |= static_cast<Word>(i < count && from[i] != 0) << i;
    return bits;
  }

  std::uint8_t const* mask_;
  int tokens_, next_, stride_, window_ = 0;
  Word remaining_ = 0, valid_ = 0;  // steps of the window still to come; unmasked tokens of this lane's step
};

template <class T, Kind kKind, int kWidth>
struct Attention {
  using L = Layout<T, kKind, kWidth>;
  using Operand = typename L::Operand;
  static constexpr int kTiles = kWidth / 16;  // mma instructions of 16 columns of D

  struct Shared {
    alignas(1024) unsigned char data[L::kWarps][L::kStages * L::kStageBytes];
    StageState stages[L::kWarps][L::kStages];
    alignas(16) State warp_state[L::kWarps][kHeadsPerCta];
    State own_state[kHeadsPerCta];
  };

  Problem const& p;
  Shared& shared;
  int batch, key_head, first_head;          // the last of those that share the key head
  int warp, row, column;                    // lane = 4 row + column
  int token_of_lane, key_slot, value_slot;  // of the chunk that this lane copies first
  std::uint8_t const *keys, *values;        // the same, in global memory
  std::uint16_t const* scales;              // of this lane: half of a warp has those of keys, half those of values
  bool is_dense;                            // no columns between tokens
  Steps steps;
  // Of head `row`. Two k blocks of 16 columns of D make an A fragment, the second as rows 8 to 15.
  Word q[kTiles / 2][4];
  float factor;  // of scores: scale, log2(e), and what the query was divided by
  float maximum, sum;
  float out[kTiles][4];  // of heads 2 * column and the next
  // With scales: weights are divided by this, the largest scale of a value so far; and what they are multiplied by.
  float unit = FLT_MIN, inverse_unit = 1.f / FLT_MIN;

  __device__ Attention(Problem const& problem, Shared& memory)
      : p(problem),
        shared(memory),
        warp(threadIdx.x / 32),
        row(threadIdx.x % 32 / 4),
        column(threadIdx.x % 4),
        steps(problem, blockIdx.x * L::kWarps + threadIdx.x / 32, gridDim.x * L::kWarps) {
    int const parts = (p.group + kHeadsPerCta - 1) / kHeadsPerCta;
    batch = blockIdx.z, key_head = blockIdx.y / parts, first_head = blockIdx.y % parts * kHeadsPerCta;
    constexpr int kBytes = L::kRow / kWidth;
    auto const base = [&](void const* data, Strides const& s) {
      return static_cast<std::uint8_t const*>(data) + (batch * s.batch + key_head * s.head) * kBytes;
    };
    int const lane = threadIdx.x % 32, chunk = lane % L::kChunks;
    token_of_lane = lane / L::kChunks, key_slot = L::key_slot(token_of_lane, chunk);
    value_slot = L::value_slot(token_of_lane, chunk);
    keys = base(p.key, p.of_key) + token_of_lane * p.of_key.token * kBytes + 16 * chunk;
    values = base(p.value, p.of_value) + token_of_lane * p.of_value.token * kBytes + 16 * chunk;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) out[i][j] = 0.f;
    }
    maximum = -INFINITY, sum = 0.f;
    if constexpr (L::kHasScales) {
      bool const of_key = lane < kStep;
      Strides const& s = of_key ? p.of_key_scale : p.of_value_scale;
      scales = static_cast<std::uint16_t const*>(of_key ? p.key_scale : p.value_scale) + batch * s.batch +
               key_head * s.head + lane % kStep;
    }
    is_dense = p.of_key.token == kWidth && p.of_value.token == kWidth;
  }

  __device__ __forceinline__ int heads() const { return min(kHeadsPerCta, p.group - first_head); }

  // The query of head `row`, in the order of keys.
  __device__ __forceinline__ void load_query() {
    int const head = key_head * p.group + min(first_head + row, p.group - 1);
    T const* const query = static_cast<T const*>(p.query) + batch * p.of_query.batch + head * p.of_query.head;
    factor = p.scale * kLog2E;
    if constexpr (!L::kHasScales) {
#pragma unroll
      for (int i = 0; i < kTiles / 2; ++i) {
        uint4 const raw = *reinterpret_cast<uint4 const*>(query + (4 * i + column) * 8);
        q[i][0] = raw.x, q[i][2] = raw.y, q[i][1] = raw.z, q[i][3] = raw.w;
      }
    } else {
      // As float16, times the power of two that makes the largest one about 2^14.
      float largest = 0.f;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        uint2 const raw = *reinterpret_cast<uint2 const*>(query + (4 * (i / 4) + column) * 16 + i % 4 * 4);
        q[i / 2][i % 2] = raw.x, q[i / 2][2 + i % 2] = raw.y;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float2 const pair = unpack(q[i / 2][2 * j + i % 2], T{});
          largest = fmaxf(largest, fmaxf(fabsf(pair.x), fabsf(pair.y)));
        }
      }
#pragma unroll
      for (int lane = 1; lane < 4; lane *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lane));
      int const exponent = static_cast<int>(__float_as_uint(largest) >> 23);  // biased by 127
      int const power = min(max(127 + 14 - exponent, -112), 112);
      float const times = __uint_as_float(static_cast<Word>(127 + power) << 23);
#pragma unroll
      for (int i = 0; i < kTiles / 2; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float2 const pair = unpack(q[i][j], T{});
          q[i][j] = pack(pair.x * times, pair.y * times, Operand{});
        }
      }
      factor *= __uint_as_float(static_cast<Word>(127 - power) << 23);
    }
  }

  // Starts copying a step, if there is one, to a stage. Returns the scale that this lane fetches for it.
  __device__ __forceinline__ std::uint16_t fetch(int stage) {
    Word valid;
    int const token = steps.advance(valid), lane = threadIdx.x % 32;
    if (lane == 0) shared.stages[warp][stage].valid = valid;
    std::uint16_t scale = 0;
    if (valid != 0) {
      SharedAddress const to = shared_address(shared.data[warp]) + stage * L::kStageBytes;
      constexpr int kBytes = L::kRow / kWidth;
      constexpr int kAtOnce = 32 / L::kChunks;  // tokens
      auto const to_key = [&](int t) {
        int const at = L::key_slot(t, 0);
        return ((to + key_slot) ^ at % 512) + at / 512 * 512;
      };
      auto const to_value = [&](int t) {
        int const at = L::value_slot(t, 0), low = at % 256;
        return ((to + L::kKeyBytes + value_slot) ^ low) + (at - low);
      };
      if (is_dense && valid == (1u << kStep) - 1) {
        std::int64_t const first = std::int64_t{token} * L::kRow;
#pragma unroll
        for (int t = 0; t < kStep; t += kAtOnce) cp_async16(to_key(t), keys + first + t * L::kRow);
#pragma unroll
        for (int t = 0; t < kStep; t += kAtOnce) cp_async16(to_value(t), values + first + t * L::kRow);
      } else {
        Word const of_lane = valid >> token_of_lane;
        auto const* const from_keys = keys + token * p.of_key.token * kBytes;
        auto const* const from_values = values + token * p.of_value.token * kBytes;
#pragma unroll
        for (int t = 0; t < kStep; t += kAtOnce) {
          cp_async16(to_key(t), from_keys + t * p.of_key.token * kBytes, of_lane >> t & 1 ? 16 : 0);
        }
#pragma unroll
        for (int t = 0; t < kStep; t += kAtOnce) {
          cp_async16(to_value(t), from_values + t * p.of_value.token * kBytes, of_lane >> t & 1 ? 16 : 0);
        }
      }
      if constexpr (L::kHasScales) {
        if (valid >> lane % kStep & 1) scale = scales[token];
      }
    }
    cp_async_commit();
    return scale;
  }

  __device__ __forceinline__ void put_scale(int stage, std::uint16_t scale) {
    if constexpr (L::kHasScales) shared.stages[warp][stage].scale[threadIdx.x % 32] = scale;
  }
  // Of a lane's tokens: 2 * column, the next, and those plus 8.
  __device__ __forceinline__ void load_scales(float (&to)[4], std::uint16_t const* from) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float2 const pair = unpack(*reinterpret_cast<Word const*>(from + 2 * column + 8 * i), T{});
      to[2 * i] = pair.x, to[2 * i + 1] = pair.y;
    }
  }

  // Scores of head `row` with tokens 2 * column, the next, and those plus 8.
  __device__ __forceinline__ void score(unsigned char const* stage, float (&scores)[4]) const {
    // Of each eight tokens, for the k blocks in rows 0 to 7 of fragments and for those in rows 8 to 15: the other half
    // of each product, of a query's columns with other columns of keys, has no meaning.
    float parts[2][2][4] = {};
    auto const multiply = [&](int half, int i, int block, Word first, Word second) {
      mma<Operand>(parts[half][block], q[i], first, second, parts[half][block]);
    };
#pragma unroll
    for (int i = 0; i < L::kKeyParts; ++i) {
      unsigned char const* const chunk = stage + L::key_slot(row, 4 * i + column);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint4 const words = *reinterpret_cast<uint4 const*>(chunk + half * L::key_slot(8, 0));
        if constexpr (!L::kHasScales) {
          multiply(half, i, 0, words.x, words.y);
          multiply(half, i, 1, words.z, words.w);
        } else {
          Word const each[] = {words.x, words.y, words.z, words.w};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            Word wide[2];
            widen<kKind>(each[j], wide);
            multiply(half, 2 * i + j / 2, j % 2, wide[0], wide[1]);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[i] = parts[i / 2][0][i % 2] + parts[i / 2][1][2 + i % 2];
  }

  // Rescales for a larger maximum of a head's scores, or of the scales of values.
  __device__ __forceinline__ void rescale(float const (&scores)[4], float largest) {
    float whole = fmaxf(maximum, fmaxf(fmaxf(scores[0], scores[1]), fmaxf(scores[2], scores[3])));
#pragma unroll
    for (int lane = 1; lane < 4; lane *= 2) whole = fmaxf(whole, __shfl_xor_sync(~0u, whole, lane));
    float kept = weight_of(maximum, whole);
    maximum = whole, sum *= kept;
    if constexpr (L::kHasScales) {
#pragma unroll
      for (int lane = 1; lane < 4; lane *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lane));
      float const before = unit;
      unit = fmaxf(unit, largest), inverse_unit = 1.f / unit;
      kept *= before * inverse_unit;
    }
    float of_head[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) of_head[j] = __shfl_sync(~0u, kept, 4 * (2 * column + j));
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) out[i][j] *= of_head[j % 2];
    }
  }

  // Adds values times weights, which are the sums of `high` and `low`.
  __device__ __forceinline__ void add_values(unsigned char const* stage, Word const (&high)[2], Word const (&low)[2]) {
    auto const add = [&](int tile, Word const(&four)[4]) {
      mma<Operand>(out[tile], four, high[0], high[1], out[tile]);
      mma<Operand>(out[tile], four, low[0], low[1], out[tile]);
    };
    // The matrices of a load: 16-bit values of tokens 0 to 7, twice, and 8 to 15, twice, a tile's chunks; of 8-bit
    // values a chunk's tokens, then the next chunk's, where a 16-bit element is two columns of a token.
    int const lane = threadIdx.x % 32, second = lane / 8 % 2, third = lane / 16;
    SharedAddress const from =
        shared_address(stage) + L::kKeyBytes +
        (L::kHasScales ? L::value_slot(lane % 8 + 8 * second, third) : L::value_slot(lane % 8 + 8 * third, second));
#pragma unroll
    for (int i = 0; i < L::kChunks; i += 2) {
      Word words[4];
      gemm::ldmatrix_x4_transposed(words, (from ^ i % 8 * 16) + i / 8 * 128);
      if constexpr (!L::kHasScales) {
        add(i / 2, words);
      } else {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          // Rows 0 to 7 are the even columns, rows 8 to 15 the odd ones.
          Word a[2], b[2];
          widen<kKind, 2>(words[2 * j], a), widen<kKind, 2>(words[2 * j + 1], b);
          Word const four[] = {a[0], a[1], b[0], b[1]};
          add(i + j, four);
        }
      }
    }
  }

  __device__ __forceinline__ void add(int stage, Word valid) {
    StageState const& state = shared.stages[warp][stage];
    unsigned char const* const data = shared.data[warp] + stage * L::kStageBytes;
    float scores[4], key_scale[4] = {1.f, 1.f, 1.f, 1.f}, value_scale[4];
    score(data, scores);
    bool is_larger = false;
    if constexpr (L::kHasScales) {
      load_scales(key_scale, state.scale);
      load_scales(value_scale, state.scale + kStep);
    }
    Word const of_lane = valid >> 2 * column;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[i] = of_lane >> (i % 2 + i / 2 * 8) & 1 ? scores[i] * (factor * key_scale[i]) : -INFINITY;
      is_larger |= scores[i] > maximum;
      if constexpr (L::kHasScales) is_larger |= value_scale[i] > unit;
    }
    if (__any_sync(~0u, is_larger)) {
      float largest = 0.f;
      if constexpr (L::kHasScales) {
        largest = fmaxf(fmaxf(value_scale[0], value_scale[1]), fmaxf(value_scale[2], value_scale[3]));
      }
      rescale(scores, largest);
    }
    float const base = maximum == -INFINITY ? 0.f : maximum;  // 0 as long as all tokens are masked
    Word high[2], low[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float weight[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        weight[j] = exp2_approximate(scores[2 * i + j] - base + kRaise);
        sum += weight[j];
        if constexpr (L::kHasScales) weight[j] *= value_scale[2 * i + j] * inverse_unit;
      }
      high[i] = pack(weight[0], weight[1], Operand{});
      float2 const rounded = unpack(high[i], Operand{});
      low[i] = pack(weight[0] - rounded.x, weight[1] - rounded.y, Operand{});
    }
    add_values(data, high, low);
  }

  // All steps of this warp.
  __device__ __forceinline__ void run() {
    std::uint16_t scales[L::kStages - 1];
#pragma unroll
    for (int i = 0; i < L::kStages - 1; ++i) scales[i] = fetch(i);
    pdl_trigger();
    load_query();
#pragma unroll
    for (int i = 0; i < L::kStages - 1; ++i) put_scale(i, scales[i]);
    std::uint16_t scale = 0;
    bool is_first = true;
    int stage = 0, refill = L::kStages - 1;
#pragma unroll 1
    while (true) {
      cp_async_wait<L::kStages - 2>();
      // The scale fetched a step ago, for the stage before the one that is filled now.
      if (!is_first) put_scale(refill == 0 ? L::kStages - 1 : refill - 1, scale);
      __syncwarp();
      Word const valid = shared.stages[warp][stage].valid;
      if (valid == 0) break;
      scale = fetch(refill);
      is_first = false;
      add(stage, valid);
      refill = stage, stage = stage + 1 == L::kStages ? 0 : stage + 1;
    }
    cp_async_wait<0>();
    __syncwarp();
  }

  // The numerators of warp i, over its stages, with heads at a distance that lets put() have no bank conflicts.
  static constexpr int kHeadStride = kWidth + 4;
  static_assert(kHeadsPerCta * kHeadStride * 4 <= L::kStages * L::kStageBytes);
  __device__ __forceinline__ float* numerators(int i) const { return reinterpret_cast<float*>(shared.data[i]); }

  __device__ __forceinline__ void put() const {
    float total = sum;
#pragma unroll
    for (int lane = 1; lane < 4; lane *= 2) total += __shfl_xor_sync(~0u, total, lane);
    if (column == 0) shared.warp_state[warp][row] = {maximum, total, {}};
    float const times = L::kHasScales ? unit : 1.f;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float* const to = numerators(warp) + (2 * column + j) * kHeadStride + 16 * i;
        if constexpr (L::kHasScales) {
          *reinterpret_cast<float2*>(to + 2 * row) = {out[i][j] * times, out[i][2 + j] * times};
        } else {
          to[row] = out[i][j], to[row + 8] = out[i][2 + j];
        }
      }
    }
  }
};

// One CTA per SM: without the second bound ptxas saves registers, and spills for D = 64.
template <class T, Kind kKind, int kWidth>
__global__ __launch_bounds__(Layout<T, kKind, kWidth>::kThreads,
                             1) void attention_kernel(__grid_constant__ Problem const p) {
  using A = Attention<T, kKind, kWidth>;
  constexpr int kThreads = A::L::kThreads, kInRow = kWidth / 4;
  auto& shared = *reinterpret_cast<typename A::Shared*>(static_cast<unsigned char*>(dynamic_smem));
  int const split = gridDim.x, rank = blockIdx.x;
  pdl_wait();
  A attention(p, shared);
  attention.run();
  attention.put();
  __syncthreads();
  int const fours = attention.heads() * kInRow, first_head = attention.key_head * p.group + attention.first_head;
  std::int64_t const first_row = std::int64_t{attention.batch} * p.key_heads * p.group + first_head;
  float* const own = attention.numerators(0);
  for (int i = threadIdx.x; i < fours; i += kThreads) {
    int const h = i / kInRow, element = i % kInRow * 4;
    Four const four = merged(
        A::L::kWarps, [&](int of) { return shared.warp_state[of][h]; },
        [&](int of) {
          return *reinterpret_cast<float4 const*>(attention.numerators(of) + h * A::kHeadStride + element);
        });
    if (split == 1) {
      store<T>(with_sink<T>(four, p.sinks, first_head + h), p.out, (first_row + h) * kWidth + element);
    } else if (p.workspace != nullptr) {
      Partials<kWidth> const partials(p.workspace, std::int64_t{p.batches} * p.key_heads * p.group * split);
      std::int64_t const row = (first_row + h) * split + rank;
      *reinterpret_cast<float4*>(partials.values + row * kWidth + element) = four.values;
      if (element == 0) partials.states[row] = {four.maximum, four.sum, {}};
    } else {
      *reinterpret_cast<float4*>(own + h * A::kHeadStride + element) = four.values;
      if (element == 0) shared.own_state[h] = {four.maximum, four.sum, {}};
    }
  }
  if (split == 1 || p.workspace != nullptr) return;
  cluster_sync();
  for (int i = threadIdx.x * split + rank; i < fours; i += kThreads * split) {
    int const h = i / kInRow, element = i % kInRow * 4;
    auto const four = merged(
        split,
        [&](int of) {
          uint4 const raw = load_dsmem(shared_address(&shared.own_state[h]), of);
          return State{__uint_as_float(raw.x), __uint_as_float(raw.y), {}};
        },
        [&](int of) {
          uint4 const raw = load_dsmem(shared_address(own + h * A::kHeadStride + element), of);
          return float4{__uint_as_float(raw.x), __uint_as_float(raw.y), __uint_as_float(raw.z), __uint_as_float(raw.w)};
        });
    store<T>(with_sink<T>(four, p.sinks, first_head + h), p.out, (first_row + h) * kWidth + element);
  }
  cluster_sync();  // no CTA ends while another reads its sums
}

}  // namespace epiloq::ops::decode_attention
