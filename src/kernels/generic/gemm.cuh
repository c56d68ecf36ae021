#pragma once

// Fallback GEMM for rows that do not start on 16 bytes: any size and stride, no tensor cores, byte-wise gathers. Many
// times slower, which `explain` reports.

#include "core/cuda_check.h"
#include "epilogue/eval.h"
#include "kernels/common/device_code.cuh"
#include "problems/gemm.h"

namespace epiloq::gemm {

// Four neighbours along K, and their accumulator.
struct Int8Quad {
  using Sum = int;
  int bytes;
  explicit __device__ Int8Quad(int bytes_) : bytes(bytes_) {}
  static __device__ __forceinline__ void multiply_add(Sum& sum, Int8Quad a, Int8Quad b) {
    sum = __dp4a(a.bytes, b.bytes, sum);
  }
};
template <class T>
struct Float8Quad {
  using Sum = float;
  float values[4];
  explicit __device__ Float8Quad(int bytes) {
    for (int i = 0; i < 4; ++i) {
      T element;
      element.__x = static_cast<unsigned char>(bytes >> 8 * i);
      values[i] = static_cast<float>(element);
    }
  }
  template <class Other>
  static __device__ __forceinline__ void multiply_add(Sum& sum, Float8Quad const& a, Other const& b) {
    for (int i = 0; i < 4; ++i) sum = fmaf(a.values[i], b.values[i], sum);
  }
};
template <class T>
using Quad = std::conditional_t<std::is_same_v<T, std::int8_t>, Int8Quad, Float8Quad<T>>;

struct Generic {
  static constexpr int kTile = 64;           // rows and columns of D per CTA
  static constexpr int kDepth = 64;          // K values per step
  static constexpr int kPitch = kDepth + 4;  // threads of a warp column fall into different banks
  static constexpr int kSide = 16;           // threads along a side
  static constexpr int kEach = kTile / kSide;

  // Copies [rows, k] bytes to shared memory, zeros past the edges.
  static __device__ void stage(std::uint8_t (&tile)[kTile][kPitch], void const* source, std::int64_t stride,
                               int first_row, int rows, int first_k, int k) {
    for (int i = threadIdx.x; i < kTile * kDepth; i += kSide * kSide) {
      int const row = i / kDepth, depth = i % kDepth;
      bool const inside = first_row + row < rows && first_k + depth < k;
      auto const* const bytes = static_cast<std::uint8_t const*>(source);
      tile[row][depth] = inside ? bytes[(first_row + row) * stride + first_k + depth] : std::uint8_t{0};
    }
  }
};

// Four CTAs per SM: left alone, ptxas targets six on SM80 and spills two words.
template <class A, class B, class Epilogue>
__global__ __launch_bounds__(256, 4) void generic_kernel(__grid_constant__ Problem const p) {
  using G = Generic;
  using Out = typename Epilogue::Out;
  __shared__ alignas(16) std::uint8_t a[G::kTile][G::kPitch];
  __shared__ alignas(16) std::uint8_t b[G::kTile][G::kPitch];
  std::int64_t const batch = blockIdx.z;
  auto const* const batch_a = static_cast<std::uint8_t const*>(p.a) + batch * p.batch_a;
  auto const* const batch_b = static_cast<std::uint8_t const*>(p.b) + batch * p.batch_b;
  auto* const batch_d = static_cast<Out*>(p.d) + batch * p.batch_d;
  int const first_m = blockIdx.x * G::kTile, first_n = blockIdx.y * G::kTile;
  int const row = threadIdx.x / G::kSide, column = threadIdx.x % G::kSide;
  typename Quad<A>::Sum sums[G::kEach][G::kEach] = {};
  pdl_trigger();
  pdl_wait();
  for (int k = 0; k < p.k; k += G::kDepth) {
    __syncthreads();
    G::stage(a, batch_a, p.stride_a, first_m, p.m, k, p.k);
    G::stage(b, batch_b, p.stride_b, first_n, p.n, k, p.k);
    __syncthreads();
#pragma unroll 4
    for (int depth = 0; depth < G::kDepth; depth += 4) {
      int x[G::kEach], w[G::kEach];
#pragma unroll
      for (int i = 0; i < G::kEach; ++i) {
        x[i] = *reinterpret_cast<int const*>(&a[row + i * G::kSide][depth]);
        w[i] = *reinterpret_cast<int const*>(&b[column + i * G::kSide][depth]);
      }
#pragma unroll
      for (int i = 0; i < G::kEach; ++i) {
        Quad<A> const left(x[i]);
#pragma unroll
        for (int j = 0; j < G::kEach; ++j) Quad<A>::multiply_add(sums[i][j], left, Quad<B>(w[j]));
      }
    }
  }
  auto const expr = Epilogue::template make<Out>(p.operands.of_batch(batch));
#pragma unroll
  for (int i = 0; i < G::kEach; ++i) {
#pragma unroll
    for (int j = 0; j < G::kEach; ++j) {
      int const m = first_m + row + i * G::kSide, n = first_n + column + j * G::kSide;
      if (m < p.m && n < p.n) batch_d[m * p.stride_d + n] = epilogue::eval(expr, sums[i][j], m, n);
    }
  }
}

template <class A, class B, class Epilogue>
void launch_generic(Problem const& p, int, Stream stream) {
  constexpr unsigned kTile = Generic::kTile;
  dim3 const grid((p.m + kTile - 1) / kTile, (p.n + kTile - 1) / kTile, p.batches);  // y and z end at 65535
  cuda_check(launch_pdl(generic_kernel<A, B, Epilogue>, grid, Generic::kSide * Generic::kSide, 0, stream, p),
             "launching epiloq.scaled_mm");
}

}  // namespace epiloq::gemm
