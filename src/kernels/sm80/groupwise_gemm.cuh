#pragma once

// Groupwise GEMM with cp.async and mma.sync, with scales by groups of K or per row, dense or with experts: int8 for
// SM80 and newer, FP8 for SM89 and newer. SM90 has a faster one (sm90/groupwise_gemm.cuh).
//
// CTAs walk over tiles of D of all experts. A stage is 128 of K; its products are promoted to the FP32 sums with a
// group's scales or, for int8, accumulated in int32.

#include <algorithm>
#include <atomic>

#include "core/cuda_check.h"
#include "epiloq/device.h"
#include "kernels/common/device_code.cuh"
#include "kernels/common/groupwise_tile_scheduler.cuh"
#include "kernels/common/ptx/cp_async.cuh"
#include "kernels/common/ptx/ldmatrix.cuh"

namespace epiloq::gemm {

// c += a b for 16 x 32 by 32 x 8 elements.
__device__ __forceinline__ void multiply_add(int (&c)[4], unsigned const (&a)[4], unsigned const (&b)[2]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void multiply_add(float (&c)[4], unsigned const (&a)[4], unsigned const (&b)[2]) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Integers and enums rather than a WarpTileConfig: nvcc 13.0 cannot name a structural value in the stub of a
// __global__ template.
template <int kWarpM, int kWarpN, int kWarpsM, int kWarpsN, int kStages, Scales kScales, class Element>
struct MmaGroupwise {
  static constexpr bool kMaySplitK = false;                        // between two CTAs
  static constexpr bool kMulticast = false, kAlternatesK = false;  // one tile per CTA
  static constexpr int kM = kWarpM * kWarpsM, kN = kWarpN * kWarpsN, kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kMinBlocks = 256 / kThreads;  // so that a thread may have all 255 registers
  static constexpr bool kExact = std::is_same_v<Element, std::int8_t>;
  static_assert(!kExact || kScales == Scales::kPerRowScales);
  static_assert(kGroupDepth % kN == 0);  // a tile's columns share their scale groups
  using Sum = std::conditional_t<kExact, int, float>;

  static constexpr int kRows = kWarpM / 16, kColumns = kWarpN / 8;  // fragments of a warp
  static constexpr int kDepth = kGroupDepth / 32;                   // products along K per stage
  static constexpr int kChunks = kGroupDepth / 16;                  // of 16 bytes, per row of a stage
  static constexpr int kStageBytes = (kM + kN) * kGroupDepth;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  using Sums = Sum[kRows][kColumns][4];  // rows r and r + 8, two neighbouring columns each

  // A row's chunks are permuted, so that the same chunk of eight neighbouring rows lies in different banks.
  static __device__ int swizzled_offset(int row, int chunk) { return row * kGroupDepth + ((chunk ^ (row % 8)) << 4); }

  // The first kCount of `rows` rows, 128 of K each; zeros past them and past K.
  template <int kCount>
  static __device__ void copy_rows(SharedAddress target, void const* first, std::int64_t stride, int rows, int k,
                                   int step) {
    constexpr int kAtOnce = kThreads / kChunks;
    static_assert(kCount % kAtOnce == 0 && kAtOnce % 8 == 0);  // so a thread's addresses are a constant apart
    int const chunk = threadIdx.x % kChunks, row = threadIdx.x / kChunks, offset = step * kGroupDepth + chunk * 16;
    int const bytes = max(0, min(16, k - offset));
    SharedAddress const at = target + swizzled_offset(row, chunk);
    auto const* source = static_cast<char const*>(first) + row * stride + offset;
#pragma unroll
    for (int i = 0; i < kCount / kAtOnce; ++i) {
      bool const inside = row + i * kAtOnce < rows && bytes > 0;
      cp_async16(at + i * kAtOnce * kGroupDepth, inside ? source : first, inside ? bytes : 0);
      source += kAtOnce * stride;
    }
  }
  static __device__ void copy_stage(SharedAddress stage, GroupwiseProblem const& p, GroupwiseTile const& tile,
                                    int step) {
    std::int64_t const weight = std::int64_t{tile.expert} * p.n + tile.first_column;
    auto const* const a = static_cast<char const*>(p.a) + tile.first_row * p.stride_a;
    auto const* const b = static_cast<char const*>(p.b) + weight * p.stride_b;
    copy_rows<kM>(stage, a, p.stride_a, tile.end_row - tile.first_row, p.k, step);
    copy_rows<kN>(stage + kM * kGroupDepth, b, p.stride_b, p.n - tile.first_column, p.k, step);
  }

  // The position of a warp in a tile, and of a thread's values in it.
  struct Position {
    int row = threadIdx.x / 32 / kWarpsN * kWarpM, column = threadIdx.x / 32 % kWarpsN * kWarpN;
    int lane = threadIdx.x % 32;
    __device__ int row_of(int fragment, int half) const { return row + 16 * fragment + 8 * half + lane / 4; }
    __device__ int column_of(int fragment) const { return column + 8 * fragment + 2 * (lane % 4); }
  };

  // Scale offsets fit 32 bits (problems/groupwise_gemm.h).
  static __device__ float row_scale(GroupwiseProblem const& p, GroupwiseTile const& tile, int row, int step) {
    unsigned const inside = min(tile.first_row + row, tile.end_row - 1) >> p.scale_a.shift;
    return p.scale_a.ptr[inside * p.scale_a.stride_row + step * p.scale_a.stride_k];
  }
  static __device__ float column_scale(GroupwiseProblem const& p, GroupwiseTile const& tile, int column, int step) {
    unsigned const inside = min(tile.first_column + column, p.n - 1) >> p.scale_b.shift;
    return p.scale_b.ptr[tile.expert * p.scale_b_expert + inside * p.scale_b.stride_row + step * p.scale_b.stride_k];
  }

  // The scales of a stage: a row's with its group's, or a row's alone.
  static __device__ void load_scales(float (&scales)[kRows][2], GroupwiseProblem const& p, GroupwiseTile const& tile,
                                     Position const& at, int step) {
    if constexpr (kScales != Scales::kPerRowScales) {
      float const block = kScales == Scales::kBlocks ? column_scale(p, tile, 0, step) : 1.f;
#pragma unroll
      for (int i = 0; i < 2 * kRows; ++i)
        scales[i / 2][i % 2] = block * row_scale(p, tile, at.row_of(i / 2, i % 2), step);
    }
  }

  // Adds a stage's products to `products`.
  static __device__ void multiply(Sums& products, SharedAddress stage, Position const& at) {
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      unsigned a[kRows][4], b[kColumns][2];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        ldmatrix_x4(a[r], stage + swizzled_offset(at.row + 16 * r + at.lane % 16, 2 * d + at.lane / 16));
      }
#pragma unroll
      for (int j = 0; j < kColumns; j += 2) {
        unsigned loaded[4];
        int const column = at.column + 8 * j + at.lane / 16 * 8 + at.lane % 8;
        ldmatrix_x4(loaded, stage + kM * kGroupDepth + swizzled_offset(column, 2 * d + at.lane / 8 % 2));
#pragma unroll
        for (int i = 0; i < 4; ++i) b[j + i / 2][i % 2] = loaded[i];
      }
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) multiply_add(products[r][j], a[r], b[j]);
      }
    }
  }

  // A stage: products, promoted to the sums with their scales.
  static __device__ void add_stage(Sums& sums, SharedAddress stage, float const (&scales)[kRows][2],
                                   GroupwiseProblem const& p, GroupwiseTile const& tile, Position const& at, int step) {
    if constexpr (kExact) {
      multiply(sums, stage, at);
    } else {
      Sums products = {};
      multiply(products, stage, at);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float of_column = 1.f;
          if constexpr (kScales == Scales::kColumns) of_column = column_scale(p, tile, at.column_of(j) + i % 2, step);
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            float const scale = kScales == Scales::kPerRowScales ? 1.f : scales[r][i / 2] * of_column;
            sums[r][j][i] = fmaf(scale, products[r][j][i], sums[r][j][i]);
          }
        }
      }
    }
  }

  static __device__ void sum(Sums& sums, GroupwiseProblem const& p, GroupwiseTile const& tile,
                             SharedAddress first_stage, Position const& at) {
    int const depth = (p.k + kGroupDepth - 1) / kGroupDepth;
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) {
      if (i < depth) copy_stage(first_stage + i * kStageBytes, p, tile, i);
      cp_async_commit();
    }
    float scales[kRows][2], next[kRows][2];
    load_scales(scales, p, tile, at, 0);
    int filled = kStages - 1, read = 0;
    for (int i = 0; i < depth; ++i) {
      cp_async_wait<kStages - 2>();
      __syncthreads();
      if (i + kStages - 1 < depth) copy_stage(first_stage + filled * kStageBytes, p, tile, i + kStages - 1);
      cp_async_commit();
      load_scales(next, p, tile, at, min(i + 1, depth - 1));
      add_stage(sums, first_stage + read * kStageBytes, scales, p, tile, at, i);
#pragma unroll
      for (int s = 0; s < 2 * kRows; ++s) scales[s / 2][s % 2] = next[s / 2][s % 2];
      filled = filled + 1 == kStages ? 0 : filled + 1;
      read = read + 1 == kStages ? 0 : read + 1;
    }
    __syncthreads();  // the next tile's copies overwrite what others still read
  }

  template <class Out>
  static __device__ void store(Sums const& sums, GroupwiseProblem const& p, GroupwiseTile const& tile,
                               Position const& at) {
    auto const* const bias = static_cast<Out const*>(p.bias);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int const column = tile.first_column + at.column_of(j) + i;
        if (column >= p.n) continue;
        float const scale_b = kScales == Scales::kPerRowScales ? column_scale(p, tile, at.column_of(j) + i, 0) : 1.f;
        float const shift = bias != nullptr ? static_cast<float>(bias[column]) : 0.f;
#pragma unroll
        for (int r = 0; r < 2 * kRows; ++r) {
          int const in_tile = at.row_of(r / 2, r % 2), row = tile.first_row + in_tile;
          if (row >= tile.end_row) continue;
          float value = static_cast<float>(sums[r / 2][j][2 * (r % 2) + i]);
          if constexpr (kScales == Scales::kPerRowScales) value = row_scale(p, tile, in_tile, 0) * (scale_b * value);
          static_cast<Out*>(p.d)[row * p.stride_d + column] = static_cast<Out>(value + shift);
        }
      }
    }
  }

  using Scheduler = GroupwiseScheduler<MmaGroupwise>;

  static __device__ void run(GroupwiseProblem const& p, GroupwiseTiles const& tiles, DType out,
                             SharedAddress first_stage) {
    Position const at;
    Scheduler scheduler(p, tiles);
    for (GroupwiseTile tile; scheduler.next(tile);) {
      Sums sums = {};
      sum(sums, p, tile, first_stage, at);
      // Chosen at run time, as the main loop dominates compile time.
      if (out == DType::kFloat16) store<__half>(sums, p, tile, at);
      if (out == DType::kBFloat16) store<__nv_bfloat16>(sums, p, tile, at);
      if (out == DType::kFloat32) store<float>(sums, p, tile, at);
    }
  }
};

template <class C>
__global__ __launch_bounds__(C::kThreads,
                             C::kMinBlocks) void mma_groupwise_kernel(__grid_constant__ GroupwiseProblem const p,
                                                                      GroupwiseTiles const tiles, DType out) {
  extern __shared__ __align__(128) unsigned char shared[];
  pdl_trigger();
  pdl_wait();
  C::run(p, tiles, out, shared_address(shared));
}

template <class C>
void launch_mma_groupwise(GroupwiseProblem const& p, DType out, int device, Stream stream) {
  auto* const kernel = mma_groupwise_kernel<C>;
  static std::atomic<int> resident[64];  // resident CTAs, determined on a device's first call
  int blocks = resident[device].load(std::memory_order_acquire);
  if (blocks == 0) {
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes),
               "asking for shared memory");
    int per_sm = 0;
    cuda_check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, C::kThreads, C::kSharedBytes),
               "asking for resident blocks");
    blocks = std::max(per_sm, 1) * device_properties(device).sm_count;
    resident[device].store(blocks, std::memory_order_release);
  }
  if (p.offs == nullptr && p.masked_m == nullptr) {
    std::int64_t const all = std::int64_t{(p.m + C::kM - 1) / C::kM} * ((p.n + C::kN - 1) / C::kN);
    blocks = static_cast<int>(std::min<std::int64_t>(blocks, all));
  }
  auto const tiles = C::Scheduler::tiles_of(p, 0);
  cuda_check(launch_pdl(kernel, blocks, C::kThreads, C::kSharedBytes, stream, p, tiles, out),
             "launching epiloq.groupwise_mm");
}

}  // namespace epiloq::gemm
