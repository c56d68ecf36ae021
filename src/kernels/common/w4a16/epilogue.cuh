#pragma once

// Epilogue of the weight-only kernels: reduces the sums of a CTA's warps or a cluster's CTAs, always in the same order,
// and writes D.

#include <cstring>

#include "kernels/common/device_code.cuh"
#include "kernels/common/ptx/cluster.cuh"
#include "kernels/common/w4a16/config.h"
#include "problems/packed_layout.h"
#include "problems/weight_only.h"

namespace epiloq::ops::weight_only_mm {

template <class T>
__device__ __forceinline__ T clamped(Problem const& p, float value) {
  return static_cast<T>(epiloq::clamped(value, p.lo, p.hi));
}

template <class T>
__device__ __forceinline__ T finished(Problem const& p, int row, float sum) {
  return clamped<T>(p, sum + (p.bias != nullptr ? static_cast<float>(static_cast<T const*>(p.bias)[row]) : 0.f));
}

template <class T>
__device__ __forceinline__ void store(Problem const& p, int token, int row, float sum) {
  if (row < p.weight.n) static_cast<T*>(p.out)[token * p.stride_out + row] = finished<T>(p, row, sum);
}

// Stores four rows of a token, the first a multiple of four.
template <class T>
__device__ __forceinline__ void store_rows(Problem const& p, int token, int row, float4 const& sums) {
  float const sum[4] = {sums.x, sums.y, sums.z, sums.w};
  bool const aligned = reinterpret_cast<std::uintptr_t>(p.out) % 8 == 0 && p.stride_out % 4 == 0;
  if (aligned && row + 4 <= p.weight.n) {
    alignas(8) T values[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) values[e] = finished<T>(p, row + e, sum[e]);
    *reinterpret_cast<uint2*>(static_cast<T*>(p.out) + token * p.stride_out + row) =
        *reinterpret_cast<uint2 const*>(values);
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) store<T>(p, token, row + e, sum[e]);
  }
}

// sums: [kTokens][sum_stride(kRows)] in shared memory, complete for this CTA. In a cluster each CTA stores some of the
// elements.
template <class T, int kRows, int kTokens>
__device__ void finish(Problem const& p, float const* sums, int first_row, int first_token, int rank, int split) {
  constexpr int kStride = sum_stride(kRows);
  int const threads = blockDim.x, elements = min(kTokens, p.m - first_token) * kRows;
  auto const for_each = [&](int first, int step, auto const& sum_of) {
    for (int i = first; i < elements; i += step) {
      int const token = i / kRows, row = i % kRows;
      store<T>(p, first_token + token, first_row + row, sum_of(sums + token * kStride + row));
    }
  };
  __syncthreads();
  if (split == 1) return for_each(threadIdx.x, threads, [](float const* at) { return *at; });
  cluster_sync();
  for_each(rank * threads + threadIdx.x, split * threads, [&](float const* at) {
    float sum = 0.f;
    for (int other = 0; other < split; ++other) sum += load_dsmem_float(at, other);
    return sum;
  });
  cluster_sync();  // other CTAs may still read this CTA's sums
}

// One 8-byte store; nvcc 13.0 splits a vector assembled from registers into two.
__device__ __forceinline__ void store_at_once(void* to, uint2 const& value) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "r"(value.x), "r"(value.y)
               : "memory");
}

// Stores a 16 x 8 accumulator tile (weight rows x tokens) from registers to D. Lane 4 g + t starts with rows g and
// g + 8 of tokens 2 t and 2 t + 1; a transposition gives it rows 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of token g, and an
// exchange with a neighbouring lane rows 4 t to 4 t + 3, so that a token's 16 rows are one 32-byte store of four lanes.
template <class T>
struct DirectRows {
  Problem const& p;
  int first_row, t;
  float bias[2];
  bool is_full;  // all rows exist, and groups of four start on 8 bytes

  __device__ __forceinline__ DirectRows(Problem const& p_, int first_row_)
      : p(p_),
        first_row(first_row_),
        t(threadIdx.x % 4),
        is_full(first_row + kPanelRows <= p.weight.n && reinterpret_cast<std::uintptr_t>(p_.out) % 8 == 0 &&
                p_.stride_out % 4 == 0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const row = first_row + 8 * half + threadIdx.x % 32 / 4;
      bias[half] = p.bias != nullptr && row < p.weight.n ? static_cast<float>(static_cast<T const*>(p.bias)[row]) : 0.f;
    }
  }

  // Rows 8 half + 2 t and the next, of token g.
  __device__ __forceinline__ unsigned pair(int half, float const* sums, float unit) const {
    T const both[2] = {clamped<T>(p, fmaf(sums[2 * half], unit, bias[half])),
                       clamped<T>(p, fmaf(sums[2 * half + 1], unit, bias[half]))};
    unsigned word;
    memcpy(&word, both, sizeof word);
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(word));
    return word;
  }

  __device__ __forceinline__ void store(int first_token, float const* sums, float unit) const {
    unsigned const words[2] = {pair(0, sums, unit), pair(1, sums, unit)};
    int const token = first_token + threadIdx.x % 32 / 4;
    T* const to = static_cast<T*>(p.out) + token * p.stride_out + first_row;
    if (is_full) {
      uint2 const four = exchanged(words);
      if (token < p.m) store_at_once(to + 4 * t, four);
      return;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      T both[2];
      memcpy(both, words + half, sizeof both);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int const row = 8 * half + 2 * t + i;
        if (token < p.m && first_row + row < p.weight.n) to[row] = both[i];
      }
    }
  }

  // Lane t of four holds words t and 4 + t of eight and receives words 2 t and 2 t + 1, by two exchanges in which even
  // lanes send one half and odd lanes the other.
  __device__ __forceinline__ uint2 exchanged(unsigned const (&words)[2]) const {
    bool const is_odd = t % 2 != 0, is_low = t < 2;
    int const even = t % 2 * 2;
    unsigned const a = __shfl_sync(~0u, is_odd ? words[1] : words[0], is_low ? even : even + 1, 4);
    unsigned const b = __shfl_sync(~0u, is_odd ? words[0] : words[1], is_low ? even + 1 : even, 4);
    return {is_low ? a : b, is_low ? b : a};
  }
};

}  // namespace epiloq::ops::weight_only_mm
