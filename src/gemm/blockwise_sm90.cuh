#pragma once

// The product of blockwise.cuh for SM90 and blocks of 128, for many tokens: weights first, so that D^T is computed.
//
// A thread block stays on its SM and takes tile after tile of 128 weight rows. One thread copies with TMA into a ring
// of stages of one block of K each; two groups of four warps multiply 64 weight rows each with wgmma. They take turns:
// one de-quantises its int32 sums, which takes a little longer than the products, while the other keeps the tensor
// cores busy. 4-bit weights reach wgmma through registers.

#include <algorithm>
#include <utility>

#include "core/cuda_check.h"
#include "core/device_code.cuh"
#include "cute/arch/mma_sm90_gmma.hpp"
#include "cutlass/arch/reg_reconfig.h"
#include "epiloq/device.h"
#include "gemm/blockwise_sm90_copies.cuh"
#include "gemm/matrix_loads.cuh"
#include "gemm/tensor_map.h"

namespace epiloq::gemm {

template <int kTokens>
struct Sm90Products;
template <>
struct Sm90Products<64> {
  using FromShared = cute::SM90::GMMA::MMA_64x64x32_S32S8S8_SS_TN;
  using FromRegisters = cute::SM90::GMMA::MMA_64x64x32_S32S8S8_RS_TN;
};
template <>
struct Sm90Products<128> {
  using FromShared = cute::SM90::GMMA::MMA_64x128x32_S32S8S8_SS_TN;
  using FromRegisters = cute::SM90::GMMA::MMA_64x128x32_S32S8S8_RS_TN;
};

template <int kTokens, int kBits>
struct BlockwiseSm90 : BlockwiseSm90Copies<kTokens, kBits> {
  using Layout = BlockwiseSm90Copies<kTokens, kBits>;
  using Layout::kChunk;
  using Layout::kGroupRows;
  using Layout::kGroups;
  using Layout::kGroupThreads;
  using Layout::kKinds;
  using Layout::kRowBytes;
  using Layout::kRows;
  using Layout::kStages;
  using Layout::kStep;
  using Layout::kTokenParameters;
  using Layout::kValues;
  using Layout::kWeightParameters;
  using Layout::kWeights;
  using Layout::tiles;
  using typename Layout::Finish;
  using typename Layout::Shared;
  using typename Layout::Tile;
  // The registers of 384 threads are shared out anew: the copying thread needs few.
  static constexpr int kCopyRegisters = 40, kProductRegisters = 232;

  using Products = std::uint32_t[kTokens / 2];
  using Sums = float[kTokens / 8][4];
  using Places = std::make_index_sequence<kTokens / 2>;

  // Rows of 128 bytes in TMA's 128-byte swizzle, K inside.
  static __device__ std::uint64_t descriptor(void const* shared) {
    auto const address = static_cast<std::uint64_t>(__cvta_generic_to_shared(shared));
    constexpr std::uint64_t kEightRows = 1024, kSwizzle128 = std::uint64_t{1} << 62;
    return (address & 0x3ffff) >> 4 | std::uint64_t{1} << 16 | kEightRows >> 4 << 32 | kSwizzle128;
  }

  template <std::size_t... kPlace>
  static __device__ void product(std::uint64_t weights, std::uint64_t tokens, Products& d, bool onto,
                                 std::index_sequence<kPlace...>) {
    using cute::SM90::GMMA::ScaleOut;
    Sm90Products<kTokens>::FromShared::fma(weights, tokens, d[kPlace]..., onto ? ScaleOut::One : ScaleOut::Zero);
  }
  template <std::size_t... kPlace>
  static __device__ void product(std::uint32_t const (&weights)[4], std::uint64_t tokens, Products& d, bool onto,
                                 std::index_sequence<kPlace...>) {
    using cute::SM90::GMMA::ScaleOut;
    Sm90Products<kTokens>::FromRegisters::fma(weights[0], weights[1], weights[2], weights[3], tokens, d[kPlace]...,
                                              onto ? ScaleOut::One : ScaleOut::Zero);
  }

  // One block of K: 64 weight rows from `rows` on by all tokens.
  static __device__ void multiply(Products& d, unsigned char const* rows, unsigned char const* values, int warp,
                                  int lane) {
    constexpr int kProducts = kStep / 32, kStride = 32 >> 4;  // of a descriptor's address
    std::uint64_t const tokens = descriptor(values);
    if constexpr (kBits == 8) {
      std::uint64_t const weights = descriptor(rows);
      cute::warpgroup_arrive();
#pragma unroll
      for (int i = 0; i < kProducts; ++i) product(weights + i * kStride, tokens + i * kStride, d, i > 0, Places{});
    } else {
      // As in blockwise.cuh; TMA's 64-byte swizzle is what ValuesB does there.
      unsigned half[2][4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int const row = 16 * warp + 8 * h + lane % 8;
        load_matrices(half[h], static_cast<unsigned>(__cvta_generic_to_shared(rows)) + row * kRowBytes +
                                   ((lane / 8 ^ row / 2 % 4) << 4));
      }
      constexpr std::uint32_t kHigh = 0xf0f0f0f0u;
      std::uint32_t weights[kProducts][4];
#pragma unroll
      for (int i = 0; i < kProducts; ++i) {
        weights[i][0] = half[0][i] << 4 & kHigh;
        weights[i][1] = half[1][i] << 4 & kHigh;
        weights[i][2] = half[0][i] & kHigh;
        weights[i][3] = half[1][i] & kHigh;
      }
      cute::warpgroup_arrive();
#pragma unroll
      for (int i = 0; i < kProducts; ++i) product(weights[i], tokens + i * kStride, d, i > 0, Places{});
    }
    cute::warpgroup_commit_batch();
  }

  // scale_w sum scale_x + total_w offset_x, and with offsets offset_w scale_x sum(q_x), onto the sums.
  static __device__ void accumulate(Sums& sums, Products const& d, float const* of_row, float const* of_token,
                                    bool has_offsets) {
    float scale[2], total[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      scale[h] = of_row[8 * h] * (kBits == 4 ? 0.0625f : 1.f);
      total[h] = of_row[kRows + 8 * h];
    }
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j) {
      auto const scale_x = *reinterpret_cast<float2 const*>(of_token + 8 * j);
      auto const offset_x = *reinterpret_cast<float2 const*>(of_token + kTokens + 8 * j);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float const scaled = static_cast<float>(static_cast<int>(d[4 * j + i])) * scale[i / 2];
        sums[j][i] = fmaf(scaled, i % 2 == 0 ? scale_x.x : scale_x.y, sums[j][i]);
        sums[j][i] = fmaf(total[i / 2], i % 2 == 0 ? offset_x.x : offset_x.y, sums[j][i]);
      }
    }
    if (!has_offsets) return;
    float const offset[2] = {of_row[2 * kRows], of_row[2 * kRows + 8]};
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j) {
      auto const sum_x = *reinterpret_cast<float2 const*>(of_token + 2 * kTokens + 8 * j);
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[j][i] = fmaf(offset[i / 2], i % 2 == 0 ? sum_x.x : sum_x.y, sums[j][i]);
    }
  }

  static __device__ void wait_for_group(int group) {
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(kGroupThreads) : "memory");
  }

  // Turns D^T into rows of D, some tokens at a time.
  static __device__ void finish(BlockwiseProblem const& p, Sums const& sums, float* mine, Tile const& tile, int group,
                                int warp, int lane) {
#pragma unroll
    for (int chunk = 0; chunk < kTokens / kChunk; ++chunk) {
      wait_for_group(group);
#pragma unroll
      for (int j = 0; j < kChunk / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          int const token = 8 * j + 2 * (lane % 4) + i % 2, row = 16 * warp + 8 * (i / 2) + lane / 4;
          mine[token * Finish::kPitch + row] = sums[chunk * kChunk / 8 + j][i];
        }
      }
      wait_for_group(group);
      Finish::store(p, mine, tile.first_m + chunk * kChunk, tile.first_n + group * kGroupRows);
    }
  }

  // Barriers 1 and 2 are the groups' own, 3 and 4 their turns.
  static __device__ void wait_for_turn(int group) {
    asm volatile("bar.sync %0, %1;" ::"r"(3 + group), "n"(kGroups * kGroupThreads) : "memory");
  }
  static __device__ void give_turn(int group) {
    asm volatile("bar.arrive %0, %1;" ::"r"(3 + group), "n"(kGroups * kGroupThreads) : "memory");
  }

  static __device__ void multiply_all(BlockwiseProblem const& p, Shared const& shared, int steps, int group) {
    int const warp = threadIdx.x % kGroupThreads / 32, lane = threadIdx.x % 32;
    int const row = group * kGroupRows + 16 * warp + lane / 4, token = 2 * (lane % 4);
    int stage = 0, turns = steps * ((tiles(p) - 1 - static_cast<int>(blockIdx.x)) / static_cast<int>(gridDim.x) + 1);
    std::uint32_t phase = 0;
    if (group == 1) give_turn(0);
    for (int index = blockIdx.x; index < tiles(p); index += gridDim.x) {
      Sums sums = {};
      for (int step = 0; step < steps; ++step) {
        shared.full[stage].wait(phase);
        wait_for_turn(group);
        Products d;
        multiply(d, shared.weights + stage * kWeights + group * kGroupRows * kRowBytes, shared.values + stage * kValues,
                 warp, lane);
        cute::warpgroup_wait<0>();
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) cute::warpgroup_fence_operand(d[i]);
        // As many turns are given as are waited for: the first was given before the loop.
        if (--turns > 0 || group == 0) give_turn(1 - group);
        accumulate(sums, d, shared.weight_parameters + stage * kWeightParameters / 4 + row,
                   shared.token_parameters + stage * kTokenParameters / 4 + token, p.kinds == kKinds);
        __syncwarp();
        if (lane == 0) shared.empty[stage].arrive();
        stage = stage + 1 == kStages ? 0 : stage + 1;
        phase ^= stage == 0;
      }
      finish(p, sums, shared.sums + group * Finish::kSharedBytes / 4, Tile(p, index), group, warp, lane);
    }
  }
};

template <class K>
__global__ __launch_bounds__(K::kThreads, 1) void blockwise_sm90_kernel(__grid_constant__ BlockwiseProblem const p,
                                                                        __grid_constant__ CUtensorMap const weights,
                                                                        __grid_constant__ CUtensorMap const tokens) {
  extern __shared__ unsigned char memory[];
  typename K::Shared const shared(memory);
  int const steps = p.k / K::kStep;
  if (threadIdx.x == 0) {
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&weights));
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&tokens));
    for (int stage = 0; stage < K::kStages; ++stage) {
      shared.full[stage].init(1);
      shared.empty[stage].init(K::kGroups * K::kGroupThreads / 32);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  let_next_kernel_start();
  int const group = threadIdx.x / K::kGroupThreads;
  if (group == K::kGroups) {
    cutlass::arch::warpgroup_reg_dealloc<K::kCopyRegisters>();
    if (threadIdx.x % K::kGroupThreads == 0) {
      K::copy_all({p, &weights, &tokens, shared}, p, steps);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<K::kProductRegisters>();
    K::multiply_all(p, shared, steps, group);
  }
}

template <int kTokens, int kBits>
struct BlockwiseSm90Gemm {
  using K = BlockwiseSm90<kTokens, kBits>;

  static void launch(BlockwiseProblem const& p, int device, Stream stream) {
    auto* const kernel = blockwise_sm90_kernel<K>;
    static PerDevice prepared;
    prepared.once(device, [kernel] {
      cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, K::kSharedBytes),
                 "asking for shared memory");
    });
    int const weight_bytes = p.k / 8 * kBits;
    CUtensorMap const weights = tensor_map_of(p.b, p.n, weight_bytes, weight_bytes, K::kRows, K::kRowBytes);
    CUtensorMap const tokens = tensor_map_of(p.a, p.m, p.k, p.k, kTokens);
    int const blocks = std::min(K::tiles(p), device_properties(device).sm_count);
    cuda_check(launch_dependent(kernel, blocks, K::kThreads, K::kSharedBytes, stream, p, weights, tokens),
               "launching epiloq.online_quant_mm");
  }
};

}  // namespace epiloq::gemm
