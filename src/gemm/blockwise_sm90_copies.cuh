#pragma once

// Shared memory of blockwise_sm90.cuh, and the one thread that fills it with TMA.

#include <cstdint>

#include "core/device_code.cuh"
#include "cute/arch/copy_sm90_desc.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/arch/barrier.h"
#include "gemm/blockwise_finish.cuh"
#include "gemm/blockwise_problem.h"

namespace epiloq::gemm {

template <int kTokens, int kBits>
struct BlockwiseSm90Copies {
  static constexpr int kRows = 128;  // of the weight, a tile
  static constexpr int kStep = 128;  // values of K, a stage: one block
  static constexpr int kGroups = 2, kGroupThreads = 128, kGroupRows = kRows / kGroups;
  static constexpr int kThreads = (1 + kGroups) * kGroupThreads;
  static constexpr int kKinds = 3;
  static constexpr int kRowBytes = kStep * kBits / 8;

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
};

}  // namespace epiloq::gemm
