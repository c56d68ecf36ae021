#pragma once

// Compile-time shape of the online_quant_mm GEMM, its shared-memory layout and pipeline.

#include <algorithm>
#include <cstdint>

#include "core/target.h"
#include "kernels/common/online_quant_epilogue.cuh"
#include "kernels/common/pipeline.cuh"
#include "kernels/common/ptx/cp_async.cuh"
#include "kernels/common/tile_bands.cuh"
#include "problems/online_quant_gemm.h"

namespace epiloq::gemm {

template <int kTokens_, int kBits_>
struct OnlineQuantSm90Tile {
  static constexpr int kTokens = kTokens_, kBits = kBits_;
  static constexpr int kRows = 128;  // of the weight, per tile
  static constexpr int kStep = 128;  // K values per stage: one quantisation block
  static constexpr int kGroups = 2, kGroupThreads = 128, kGroupRows = kRows / kGroups;
  static constexpr int kKinds = 3;  // of parameters
  // Number of parts in which the sums' scales are computed: threads that unpack weights have no registers for all of
  // them.
  static constexpr int kScaleParts = kBits == 4 && kTokens == 128 ? 2 : 1;

  // Above 64 tokens a consumer thread needs more registers than an equal share of the CTA's 384 threads gives, so they
  // are reallocated; asking for more than the CTA was launched with deadlocks. With fewer tokens neither that nor
  // ping-pong (see OnlineQuantSm90Mainloop) is faster.
  static constexpr bool kIsNarrow = kTokens <= 64, kReallocatesRegisters = !kIsNarrow, kPingpong = !kIsNarrow;
  static constexpr int kProducerWarps = kIsNarrow ? 2 : 4, kThreads = kGroups * kGroupThreads + kProducerWarps * 32;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232, kLaunchRegisters = 168;
  static_assert(!kReallocatesRegisters ||
                (kProducerRegisters + kGroups * kConsumerRegisters) * kGroupThreads <= kLaunchRegisters * kThreads);
  static constexpr int kFullArrivals = 2, kEmptyArrivals = kGroups * kGroupThreads / 32;

  static constexpr int kRowBytes = kStep * kBits / 8;  // of the weight
  static constexpr int kWeights = kRows * kRowBytes, kValues = kTokens * kStep;
  static constexpr int kPlane = kTokens * 16;  // a kind of token parameters, in TF32 parts
  static constexpr int kTokenParts = kKinds * kPlane;
  static constexpr int kWeightParameters = kKinds * kRows * 4;
  static constexpr int kStageBytes = kWeights + kValues + kTokenParts + kWeightParameters;

  // Tokens stored together, by TMA, from slots or from the stages.
  static constexpr int kChunk = kTokens % 32 == 0 ? 32 : 16;
  using Epilogue = OnlineQuantEpilogue<kChunk, kGroupRows, 1, kGroupThreads, 4>;
  static constexpr int kLine = kGroupRows * 2, kSlots = 2, kSlotBytes = kChunk * kLine;
  static constexpr int kAlignment = 1024;  // of TMA's 128-byte swizzle
  static constexpr int kGroupSlots =
      (std::max(kSlots * kSlotBytes, Epilogue::kSharedBytes) + kAlignment - 1) / kAlignment * kAlignment;
  static_assert(kLine == 128 && kWeights % kAlignment == 0 && kValues % kAlignment == 0);
  static constexpr int kMaxStages = 8, kBarrierBytes = (2 * kMaxStages + 1) * 8;
  static constexpr int kFixedBytes = kGroups * kGroupSlots + kBarrierBytes + kAlignment;
  static constexpr int kSharedOfSm90 = 232448;
  static constexpr int kStages = std::min((kSharedOfSm90 - kFixedBytes) / kStageBytes, kMaxStages);
  static constexpr int kSharedBytes = kFixedBytes + kStages * kStageBytes;
  static_assert(kStages >= 3);
  static constexpr int kEarlySteps = 2;  // whose weights are issued before everything else
  using State = PipelineState<kStages>;

  // With split-K the stages hold the partial sums of the CTA's 8-token groups, one vector per lane: those of all CTAs,
  // for as many groups as any CTA owns.
  static constexpr int kTokenGroups = kTokens / 8, kConsumerWarps = kGroups * kGroupThreads / 32;
  static constexpr int kVectors = kConsumerWarps * 32 * 16;  // bytes
  static_assert((kTokenGroups + kMaxCluster - 1) * kVectors <= kStages * (kWeights + kValues));

  // Addresses of the first stage's parts.
  struct Shared {
    SharedAddress weights, values, parts, weight_parameters;
    SharedAddress full, empty, received;
    unsigned char* slots;  // output staging, one warpgroup's after the other's

    __device__ explicit Shared(unsigned char* base) {
      SharedAddress const raw = shared_address(base);
      unsigned char* const aligned = base + (kAlignment - raw % kAlignment) % kAlignment;
      slots = aligned + kStages * (kWeights + kValues);
      unsigned char* const of_parts = slots + kGroups * kGroupSlots;
      weights = shared_address(aligned);
      values = weights + kStages * kWeights;
      parts = shared_address(of_parts);
      weight_parameters = parts + kStages * kTokenParts;
      full = weight_parameters + kStages * kWeightParameters;
      empty = full + kMaxStages * 8;
      received = empty + kMaxStages * 8;
    }
  };

  // Parameters that the stage of block i of `steps` brings for either operand: all kinds; or, if weights have no
  // offsets, the scales and, every other time, the second kind of this block and the next. The last block may have no
  // next: `none` is then a line of zeros or, for tokens, any line.
  struct Parameters {
    bool has_offsets, are_added, has_next;
    __device__ Parameters(bool has_offsets_, int i, int steps)
        : has_offsets(has_offsets_), are_added(has_offsets || i % 2 == 0), has_next(i + 1 < steps) {}
    __device__ int lines() const { return are_added ? kKinds : 1; }
    // The source line, counted from the block's first.
    __device__ int source(int line, int kinds_of_block, int none) const {
      return line < 2 || has_offsets ? line : has_next ? kinds_of_block + 1 : none;
    }
  };

  // A tile's first row and column of D.
  struct TileOrigin {
    int first_m = 0, first_n;
    __device__ TileOrigin(OnlineQuantGemmProblem const& p, int tile) : first_n(tile * kRows) {
      if (p.m <= kTokens) return;  // avoids a division
      TilePlace const place = tile_in_bands<kTokens>(tile, token_tiles(p), row_tiles(p));
      first_m = place.token_tile * kTokens, first_n = place.row_tile * kRows;
    }
  };
  static __host__ __device__ int token_tiles(OnlineQuantGemmProblem const& p) { return (p.m + kTokens - 1) / kTokens; }
  static __host__ __device__ int row_tiles(OnlineQuantGemmProblem const& p) { return (p.n + kRows - 1) / kRows; }
  static __host__ __device__ int tiles(OnlineQuantGemmProblem const& p) { return token_tiles(p) * row_tiles(p); }

  // A CTA's tiles: whole ones, then one whose K its cluster splits, if any.
  struct TileScheduler {
    int tiles, whole, split_tile;  // `split_tile`: at least `tiles` if there is none
    int all;                       // quantisation blocks along K

    __device__ explicit TileScheduler(OnlineQuantGemmProblem const& p)
        : tiles(OnlineQuantSm90Tile::tiles(p)),
          whole(gridDim.y == 1 ? tiles : p.whole),
          split_tile(whole + blockIdx.x),
          all(p.k / kStep) {}
    __device__ bool has_split_tile() const { return split_tile < tiles; }
    __device__ bool is_split(int tile) const { return tile >= whole; }
    // Valid while it is below `tiles`.
    __device__ int first() const { return whole_or_split(blockIdx.x * gridDim.y + blockIdx.y); }
    __device__ int after(int tile) const {
      return is_split(tile) ? tiles : whole_or_split(tile + gridDim.x * gridDim.y);
    }
    __device__ int first_step(int tile) const { return is_split(tile) ? blockIdx.y * all / gridDim.y : 0; }
    __device__ int steps(int tile) const {
      return is_split(tile) ? (blockIdx.y + 1) * all / gridDim.y - first_step(tile) : all;
    }

   private:
    __device__ int whole_or_split(int tile) const { return tile < whole ? tile : split_tile; }
  };
};

}  // namespace epiloq::gemm
