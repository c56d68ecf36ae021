#pragma once

// The product of blockwise.cuh for SM90 and blocks of 128, for many tokens: weights first, so that D^T is computed.
//
// A thread block stays on its SM and takes tile after tile of 128 weight rows. One thread copies with TMA into a ring
// of stages of one block of K each; two groups of four warps multiply 64 weight rows each with wgmma. They take turns:
// one de-quantises its int32 sums, which takes a little longer than the products, while the other keeps the tensor
// cores busy. 4-bit weights reach wgmma through registers.

#include "core/cuda_check.h"
#include "core/device_code.cuh"
#include "cute/arch/copy_sm90_desc.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/arch/mma_sm90_gmma.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "epiloq/device.h"
#include "gemm/blockwise_finish.cuh"
#include "gemm/blockwise_problem.h"
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
struct BlockwiseSm90 {
  static constexpr int kRows = 128;  // of the weight, a tile
  static constexpr int kStep = 128;  // values of K, a stage: one block
  static constexpr int kGroups = 2, kGroupThreads = 128, kGroupRows = kRows / kGroups;
  static constexpr int kThreads = (1 + kGroups) * kGroupThreads;
  static constexpr int kKinds = 3;
  static constexpr int kRowBytes = kStep * kBits / 8;
  // The registers of 384 threads are shared out anew: the copying thread needs few.
  static constexpr int kCopyRegisters = 40, kProductRegisters = 232;

  static constexpr int kWeights = kRows * kRowBytes, kValues = kTokens * kStep;
  static constexpr int kWeightParameters = kKinds * kRows * 4, kTokenParameters = kKinds * kTokens * 4;
  static constexpr int kStageBytes = kWeights + kValues + kWeightParameters + kTokenParameters;
  static constexpr int kChunk = 32;  // tokens that are written together
  using Finish = BlockwiseFinish<kChunk, kGroupRows, 1, kGroupThreads, 4>;
  static constexpr int kAlignment = 1024;  // of TMA's widest swizzle
  static constexpr int kSharedOfSm90 = 232448;
  static constexpr int kFixedBytes = kGroups * Finish::kSharedBytes + 2 * 8 * 8 + kAlignment;
  static constexpr int kRoom = (kSharedOfSm90 - kFixedBytes) / kStageBytes;
  static constexpr int kStages = kRoom < 8 ? kRoom : 8;
  static constexpr int kSharedBytes = kFixedBytes + kStages * kStageBytes;

  using Barrier = cutlass::arch::ClusterTransactionBarrier;
  using Products = std::uint32_t[kTokens / 2];
  using Sums = float[kTokens / 8][4];
  using Places = std::make_index_sequence<kTokens / 2>;

  struct Shared {
    unsigned char* weights;
    unsigned char* values;
    float* weight_parameters;
    float* token_parameters;
    float* sums;
    Barrier* full;
    Barrier* empty;

    __device__ explicit Shared(unsigned char* base) {
      auto const address = reinterpret_cast<std::uintptr_t>(base);
      weights = base + (kAlignment - address % kAlignment) % kAlignment;
      values = weights + kStages * kWeights;
      weight_parameters = reinterpret_cast<float*>(values + kStages * kValues);
      token_parameters = weight_parameters + kStages * kWeightParameters / 4;
      sums = token_parameters + kStages * kTokenParameters / 4;
      full = reinterpret_cast<Barrier*>(sums + kGroups * Finish::kSharedBytes / 4);
      empty = full + kStages;
    }
  };

  struct Tile {
    int first_m, first_n;
    __device__ Tile(BlockwiseProblem const& p, int tile)
        : first_m(tile % token_tiles(p) * kTokens), first_n(tile / token_tiles(p) * kRows) {}
  };
  static __host__ __device__ int token_tiles(BlockwiseProblem const& p) { return (p.m + kTokens - 1) / kTokens; }
  static __host__ __device__ int tiles(BlockwiseProblem const& p) {
    return token_tiles(p) * ((p.n + kRows - 1) / kRows);
  }

  // The copying thread's work on one stage.
  struct Copies {
    BlockwiseProblem const& p;
    CUtensorMap const* weight_map;
    CUtensorMap const* token_map;
    Shared const& shared;

    // Bytes of one kind of parameters: rows past the padded ones are not there.
    static __device__ int bytes(int first, int padded, int tile) { return 4 * min(tile, padded - first); }

    __device__ void parameters(float* target, float const* source, int source_kinds, int first, int padded, int tile,
                               int step, std::uint64_t* barrier) const {
      for (int kind = 0; kind < p.kinds; ++kind) {
        std::int64_t const line = static_cast<std::int64_t>(step) * source_kinds + kind;
        cute::SM90_BULK_COPY_G2S::copy(source + line * padded + first, barrier, target + kind * tile,
                                       bytes(first, padded, tile));
      }
    }
    __device__ std::uint64_t* barrier(int stage) const { return reinterpret_cast<std::uint64_t*>(shared.full + stage); }

    __device__ void expect(int stage, Tile const& tile) const {
      shared.full[stage].arrive_and_expect_tx(
          kWeights + kValues +
          p.kinds * (bytes(tile.first_n, p.padded_n, kRows) + bytes(tile.first_m, p.padded_m, kTokens)));
    }
    __device__ void weights(int stage, Tile const& tile, int step) const {
      constexpr auto kHint = static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
      cute::SM90_TMA_LOAD_2D::copy(weight_map, barrier(stage), kHint, shared.weights + stage * kWeights,
                                   step * kRowBytes, tile.first_n);
      parameters(shared.weight_parameters + stage * kWeightParameters / 4, p.b_parameters, p.kinds, tile.first_n,
                 p.padded_n, kRows, step, barrier(stage));
    }
    __device__ void tokens(int stage, Tile const& tile, int step) const {
      constexpr auto kHint = static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
      cute::SM90_TMA_LOAD_2D::copy(token_map, barrier(stage), kHint, shared.values + stage * kValues, step * kStep,
                                   tile.first_m);
      parameters(shared.token_parameters + stage * kTokenParameters / 4, p.a_parameters, kKinds, tile.first_m,
                 p.padded_m, kTokens, step, barrier(stage));
    }
  };

  // Weights of the first stages are asked for before the quantising kernel has finished: it waited for whoever wrote
  // them before it let this kernel start.
  static __device__ void copy_all(Copies const& copies, BlockwiseProblem const& p, int steps) {
    int const early = min(steps, kStages);
    Tile const first(p, blockIdx.x);
    for (int step = 0; step < early; ++step) {
      copies.expect(step, first);
      copies.weights(step, first, step);
    }
    wait_for_previous_kernel();
    int stage = 0;
    std::uint32_t phase = 1;  // of the empty barriers: the first wait for each passes
    bool is_early = true;
    for (int index = blockIdx.x; index < tiles(p); index += gridDim.x) {
      Tile const tile(p, index);
      for (int step = 0; step < steps; ++step) {
        if (!is_early || step >= early) {
          copies.shared.empty[stage].wait(phase);
          copies.expect(stage, tile);
          copies.weights(stage, tile, step);
        }
        copies.tokens(stage, tile, step);
        stage = stage + 1 == kStages ? 0 : stage + 1;
        phase ^= stage == 0;
      }
      is_early = false;
    }
  }

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
    CUtensorMap const weights = tensor_map(p.b, p.n, p.k / 8 * kBits, K::kRows, K::kRowBytes);
    CUtensorMap const tokens = tensor_map(p.a, p.m, p.k, kTokens, K::kStep);
    int const blocks = std::min(K::tiles(p), device_properties(device).sm_count);
    cuda_check(launch_dependent(kernel, blocks, K::kThreads, K::kSharedBytes, stream, p, weights, tokens),
               "launching epiloq.online_quant_mm");
  }
};

}  // namespace epiloq::gemm
