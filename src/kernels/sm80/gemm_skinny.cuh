#pragma once

// Skinny int8 GEMM for small M, bound by reading the weights once.
//
// A CTA owns 16 * panels weight rows and every token. Its warps split K in steps of 64 bytes and stream weights
// straight into mma.sync fragments: a dot product does not depend on the order of K, so each thread takes 16
// consecutive bytes of a row, the same for weights and tokens, and the main loop has no shared memory, shuffle or
// barrier. Panels of 16 rows let a grid fill any number of SMs evenly. The warps' int32 sums are reduced in shared
// memory, exactly.

#include "core/cuda_check.h"
#include "epilogue/eval.h"
#include "kernels/common/device_code.cuh"
#include "kernels/common/tile_config.h"
#include "problems/gemm.h"

namespace epiloq::gemm {

__device__ __forceinline__ void mma_m16n8k32(int (&c)[4], int a0, int a1, int a2, int a3, int b0, int b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Integers rather than a SkinnyConfig: nvcc 13.0 cannot name a structural value in the stub of a __global__ template.
template <int kPanels_, int kTokens, int kWarps, int kUnroll_>
struct Skinny {
  static constexpr int kPanels = kPanels_;
  static constexpr int kUnroll = kUnroll_;
  static constexpr int kTokenTiles = kTokens / 8;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kRows = 16 * kPanels;    // of the weight, per CTA
  static constexpr int kStep = 64;              // bytes of K per warp and step
  static constexpr int kSumStride = kRows + 4;  // avoids bank conflicts
  static constexpr int kSharedBytes = kWarps * kTokens * kSumStride * 4;

  struct Step {
    int4 weight[kPanels][2];
    int4 token[kTokenTiles];
  };

  // A thread's sources. Tokens past the last are read as the last, and their sums dropped.
  struct Source {
    std::int8_t const* weight;
    std::int64_t weight_stride;  // 8 rows
    std::int8_t const* token[kTokenTiles];
    int k_lane, k_end;

    __device__ Source(Problem const& p, int first_row, int lane)
        : weight(static_cast<std::int8_t const*>(p.b) + (first_row + lane / 4) * p.stride_b + 16 * (lane % 4)),
          weight_stride(8 * p.stride_b),
          k_lane(16 * (lane % 4)),
          k_end(p.k) {
#pragma unroll
      for (int j = 0; j < kTokenTiles; ++j) {
        token[j] = static_cast<std::int8_t const*>(p.a) + min(8 * j + lane / 4, p.m - 1) * p.stride_a + k_lane;
      }
    }

    __device__ void load(Step& step, int k) const {
      bool const inside = k + k_lane < k_end;  // K is a multiple of 16
      auto read = [&](std::int8_t const* base) {
        return inside ? __ldcg(reinterpret_cast<int4 const*>(base + k)) : int4{0, 0, 0, 0};
      };
#pragma unroll
      for (int s = 0; s < kPanels; ++s) {
        step.weight[s][0] = read(weight + 2 * s * weight_stride);
        step.weight[s][1] = read(weight + (2 * s + 1) * weight_stride);
      }
#pragma unroll
      for (int j = 0; j < kTokenTiles; ++j) step.token[j] = read(token[j]);
    }
  };

  static __device__ void multiply(int (&sums)[kPanels][kTokenTiles][4], Step const& step) {
#pragma unroll
    for (int s = 0; s < kPanels; ++s) {
      int4 const lo = step.weight[s][0], hi = step.weight[s][1];
#pragma unroll
      for (int j = 0; j < kTokenTiles; ++j) {
        int4 const x = step.token[j];
        mma_m16n8k32(sums[s][j], lo.x, hi.x, lo.y, hi.y, x.x, x.y);
        mma_m16n8k32(sums[s][j], lo.z, hi.z, lo.w, hi.w, x.z, x.w);
      }
    }
  }

  // Prefetches the CTA's weights into L2. Safe before pdl_wait even if the previous kernel writes them, as its writes
  // go to L2.
  static __device__ void prefetch(Problem const& p, int first_row) {
    constexpr int kLine = 128;
    int const lines = (p.k + kLine - 1) / kLine;
    for (int i = threadIdx.x; i < kRows * lines; i += kThreads) {
      auto const* line =
          static_cast<std::int8_t const*>(p.b) + (first_row + i / lines) * p.stride_b + (i % lines) * kLine;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
    }
  }

  static __device__ void store_sums(int* shared, int (&sums)[kPanels][kTokenTiles][4], int warp, int lane) {
    int* const mine = shared + warp * kTokens * kSumStride;
#pragma unroll
    for (int s = 0; s < kPanels; ++s) {
#pragma unroll
      for (int j = 0; j < kTokenTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          int const token = 8 * j + 2 * (lane % 4) + i % 2;
          int const row = 16 * s + 8 * (i / 2) + lane / 4;
          mine[token * kSumStride + row] = sums[s][j][i];
        }
      }
    }
  }

  template <class Epilogue>
  static __device__ void finish(Problem const& p, int const* shared, int first_row) {
    using Out = typename Epilogue::Out;
    auto const expr = Epilogue::template make<Out>(p.operands);
    for (int i = threadIdx.x; i < kRows * p.m; i += kThreads) {
      int const token = i / kRows, row = i % kRows;
      int acc = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) acc += shared[(w * kTokens + token) * kSumStride + row];
      int const n = first_row + row;
      static_cast<Out*>(p.d)[token * p.stride_d + n] = epilogue::eval(expr, acc, token, n);
    }
  }
};

template <class K, class Epilogue>
__global__ __launch_bounds__(K::kThreads) void skinny_kernel(__grid_constant__ Problem const p) {
  extern __shared__ int shared[];
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // The last CTA starts early enough to be whole: rows that two CTAs compute are identical.
  int const first_row = min(static_cast<int>(blockIdx.x) * K::kRows, p.n - K::kRows);

  pdl_trigger();
  K::prefetch(p, first_row);
  pdl_wait();

  constexpr int kStride = K::kThreads / 32 * K::kStep;  // between a warp's steps
  typename K::Source const source(p, first_row, lane);
  int sums[K::kPanels][K::kTokenTiles][4] = {};
  typename K::Step steps[K::kUnroll];
  int k = warp * K::kStep;
#pragma unroll
  for (int u = 0; u < K::kUnroll; ++u) source.load(steps[u], k + u * kStride);
  for (; k < p.k; k += K::kUnroll * kStride) {
#pragma unroll
    for (int u = 0; u < K::kUnroll; ++u) {
      K::multiply(sums, steps[u]);
      source.load(steps[u], k + (u + K::kUnroll) * kStride);
    }
  }

  K::store_sums(shared, sums, warp, lane);
  __syncthreads();
  K::template finish<Epilogue>(p, shared, first_row);
}

template <SkinnyConfig kConfig, class Epilogue>
struct SkinnyGemm {
  using K = Skinny<kConfig.panels, kConfig.tokens, kConfig.warps, kConfig.unroll>;

  // Needs n >= 16 * panels, m <= tokens, k % 16 == 0 and 16-byte rows in A and B.
  static void launch(Problem const& p, int device, Stream stream) {
    auto* const kernel = skinny_kernel<K, Epilogue>;
    static PerDevice prepared;
    prepared.allow_shared(kernel, K::kSharedBytes, device);
    unsigned const blocks = (p.n + K::kRows - 1) / K::kRows;
    cuda_check(launch_pdl(kernel, blocks, K::kThreads, K::kSharedBytes, stream, p), "launching epiloq.scaled_mm");
  }
};

}  // namespace epiloq::gemm
