#pragma once

// Shared memory of blockwise_sm90.cuh, and the two threads that fill it with TMA.

#include <cstdint>

#include "core/device_code.cuh"
#include "cutlass/arch/barrier.h"
#include "gemm/blockwise_finish.cuh"
#include "gemm/blockwise_problem.h"
#include "gemm/tensor_map.h"
#include "gemm/tma.cuh"

namespace epiloq::gemm {

// An operand's values and its parameters.
struct BlockwiseSm90Operand {
  CUtensorMap values, parameters;
};

struct BlockwiseSm90Params {
  BlockwiseProblem p;
  BlockwiseSm90Operand weights, tokens;
};

template <int kTokens, int kBits>
struct BlockwiseSm90Copies {
  static constexpr int kRows = 128;  // of the weight, a tile
  static constexpr int kStep = 128;  // values of K, a stage: one block
  static constexpr int kGroups = 2, kGroupThreads = 128, kGroupRows = kRows / kGroups;
  static constexpr int kThreads = (1 + kGroups) * kGroupThreads;
  static constexpr int kCopyingThreads = 2;
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

  static BlockwiseSm90Params params_of(BlockwiseProblem const& p) {
    int const weight_bytes = p.k / 8 * kBits, steps = p.k / kStep;
    return {p,
            {tensor_map_of(p.b, p.n, weight_bytes, weight_bytes, kRows, kRowBytes),
             parameters(p.b_parameters, p.padded_n, steps * p.kinds, kRows, p.kinds)},
            {tensor_map_of(p.a, p.m, p.k, p.k, kTokens),
             parameters(p.a_parameters, p.padded_m, steps * kKinds, kTokens, p.kinds)}};
  }

  // A thread's work: one operand's values and parameters, stage after stage. Absent rows count and are read as zeros.
  static __device__ void copy_all(Shared const& shared, BlockwiseSm90Params const& params, bool of_weights) {
    auto const& operand = of_weights ? params.weights : params.tokens;
    int const steps = params.p.k / kStep, source_kinds = of_weights ? params.p.kinds : kKinds;
    int const step_bytes = of_weights ? kRowBytes : kStep, bytes = of_weights ? kWeights : kValues;
    int const parameter_bytes = of_weights ? kWeightParameters : kTokenParameters;
    SharedAddress const values = shared_address(of_weights ? shared.weights : shared.values);
    SharedAddress const lines = shared_address(of_weights ? shared.weight_parameters : shared.token_parameters);
    SharedAddress const full = shared_address(shared.full), empty = shared_address(shared.empty);
    int const expected = bytes + parameter_bytes / kKinds * params.p.kinds;
    int stage = 0;
    std::uint32_t phase = 1;  // of the empty barriers: the first wait for each passes
    for (int index = blockIdx.x; index < tiles(params.p); index += gridDim.x) {
      Tile const tile(params.p, index);
      int const first = of_weights ? tile.first_n : tile.first_m;
      for (int step = 0; step < steps; ++step) {
        wait_for_barrier(empty + stage * 8, phase);
        expect_bytes(full + stage * 8, expected);
        copy_box(values + stage * bytes, operand.values, step * step_bytes, first, full + stage * 8);
        copy_box(lines + stage * parameter_bytes, operand.parameters, first, step * source_kinds, full + stage * 8);
        stage = stage + 1 == kStages ? 0 : stage + 1;
        phase ^= stage == 0;
      }
    }
  }

 private:
  // Lines of float32, a kind of parameters each: boxes of `rows` of `kinds` lines.
  static CUtensorMap parameters(float const* data, int padded, int lines, int rows, int kinds) {
    auto const columns = static_cast<std::uint64_t>(padded);
    return encode_tensor_map(data, {columns, static_cast<std::uint64_t>(lines)}, {4 * columns},
                             {static_cast<std::uint32_t>(rows), static_cast<std::uint32_t>(kinds)},
                             CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_DATA_TYPE_FLOAT32);
  }
};

}  // namespace epiloq::gemm
