#pragma once

// Shapes of the kernel of w4a8_gemm.cuh: a tile, what a stage keeps in shared memory, and the ring of stages.

#include <algorithm>
#include <cstdint>

#include "core/target.h"
#include "kernels/common/ptx/cp_async.cuh"
#include "kernels/common/w4a8_epilogue.cuh"
#include "problems/w4a8_gemm.h"

namespace epiloq::gemm {

// A place in the ring of stages.
template <int kStages>
struct BlockwisePipeline {
  int stage = 0;
  std::uint32_t phase = 0;
  __device__ void advance() {
    stage = stage + 1 == kStages ? 0 : stage + 1;
    phase ^= stage == 0;
  }
};

template <int kTokens_, int kBits_>
struct BlockwiseSm90Tile {
  static constexpr int kTokens = kTokens_, kBits = kBits_;
  static constexpr int kRows = 128;  // of the weight, a tile
  static constexpr int kStep = 128;  // values of K, a stage: one block
  static constexpr int kGroups = 2, kGroupThreads = 128, kGroupRows = kRows / kGroups;
  static constexpr int kKinds = 3;  // of parameters
  // In how many goes the sums' scales are made: weights that a thread unpacks leave no registers for all of them.
  static constexpr int kScaleParts = kBits == 4 && kTokens == 128 ? 2 : 1;

  // With sums of more than 64 tokens a thread wants more than the registers that 384 threads begin with, which are
  // shared out anew: asked for more than those, a block waits for ever. With fewer, neither that nor turns (see
  // BlockwiseSm90Mainloop) are worth their time: 0 to 7 % of 64 tokens (online-quant-few.json).
  static constexpr bool kIsNarrow = kTokens <= 64, kSharesRegisters = !kIsNarrow, kPingpong = !kIsNarrow;
  static constexpr int kCopyWarps = kIsNarrow ? 2 : 4, kThreads = kGroups * kGroupThreads + kCopyWarps * 32;
  static constexpr int kCopyRegisters = 40, kProductRegisters = 232, kFirstRegisters = 168;
  static_assert(!kSharesRegisters ||
                (kCopyRegisters + kGroups * kProductRegisters) * kGroupThreads <= kFirstRegisters * kThreads);
  static constexpr int kFullArrivals = 2, kEmptyArrivals = kGroups * kGroupThreads / 32;

  static constexpr int kRowBytes = kStep * kBits / 8;  // of the weight
  static constexpr int kWeights = kRows * kRowBytes, kValues = kTokens * kStep;
  static constexpr int kPlane = kTokens * 16;  // a kind of the tokens' parameters, in parts
  static constexpr int kTokenParts = kKinds * kPlane;
  static constexpr int kWeightParameters = kKinds * kRows * 4;
  static constexpr int kStageBytes = kWeights + kValues + kTokenParts + kWeightParameters;

  // Tokens that are written together, by TMA from slots or from sums that take their place.
  static constexpr int kChunk = kTokens % 32 == 0 ? 32 : 16;
  using Finish = BlockwiseFinish<kChunk, kGroupRows, 1, kGroupThreads, 4>;
  static constexpr int kLine = kGroupRows * 2, kSlots = 2, kSlotBytes = kChunk * kLine;
  static constexpr int kAlignment = 1024;  // of TMA's widest swizzle, of lines of 128 bytes
  static constexpr int kGroupSlots =
      (std::max(kSlots * kSlotBytes, Finish::kSharedBytes) + kAlignment - 1) / kAlignment * kAlignment;
  static_assert(kLine == 128 && kWeights % kAlignment == 0 && kValues % kAlignment == 0);
  static constexpr int kMaxStages = 8, kBarrierBytes = (2 * kMaxStages + 1) * 8;
  static constexpr int kFixedBytes = kGroups * kGroupSlots + kBarrierBytes + kAlignment;
  static constexpr int kSharedOfSm90 = 232448;
  static constexpr int kStages = std::min((kSharedOfSm90 - kFixedBytes) / kStageBytes, kMaxStages);
  static constexpr int kSharedBytes = kFixedBytes + kStages * kStageBytes;
  static_assert(kStages >= 3);
  static constexpr int kEarlySteps = 2;  // whose weights are asked for before all else
  using Ring = BlockwisePipeline<kStages>;

  // Where blocks of a cluster share K, sums of a block's eights of the tokens, a vector a lane, take the ring's place:
  // those of all blocks, of as many eights as any block finishes.
  static constexpr int kEights = kTokens / 8, kConsumerWarps = kGroups * kGroupThreads / 32;
  static constexpr int kVectors = kConsumerWarps * 32 * 16;  // bytes
  static_assert((kEights + kMaxCluster - 1) * kVectors <= kStages * (kWeights + kValues));

  // Addresses of the first stage's parts, of which the others' follow.
  struct Shared {
    SharedAddress weights, values, parts, weight_parameters;
    SharedAddress full, empty, received;
    unsigned char* slots;  // of what leaves, a group's after the other's

    __device__ explicit Shared(unsigned char* base) {
      SharedAddress const raw = shared_address(base);
      unsigned char* const ring = base + (kAlignment - raw % kAlignment) % kAlignment;
      slots = ring + kStages * (kWeights + kValues);
      unsigned char* const of_parts = slots + kGroups * kGroupSlots;
      weights = shared_address(ring);
      values = weights + kStages * kWeights;
      parts = shared_address(of_parts);
      weight_parameters = parts + kStages * kTokenParts;
      full = weight_parameters + kStages * kWeightParameters;
      empty = full + kMaxStages * 8;
      received = empty + kMaxStages * 8;
    }
  };

  // What the stage of the ith of `steps` blocks brings of either operand's parameters: all kinds; or, where weights
  // have no offsets, the scales, and every other time the second kind, of the block and of the next one. The last block
  // may be without a next one: `none` is a line of zeros or, of tokens, whose factors those are, any line.
  struct Parameters {
    bool has_offsets, are_added, has_next;
    __device__ Parameters(bool has_offsets_, int i, int steps)
        : has_offsets(has_offsets_), are_added(has_offsets || i % 2 == 0), has_next(i + 1 < steps) {}
    __device__ int lines() const { return are_added ? kKinds : 1; }
    // Which one is a line, counted from the block's first.
    __device__ int source(int line, int kinds_of_block, int none) const {
      return line < 2 || has_offsets ? line : has_next ? kinds_of_block + 1 : none;
    }
  };

  struct Place {
    int first_m = 0, first_n;
    __device__ Place(BlockwiseProblem const& p, int tile) : first_n(tile * kRows) {
      if (p.m <= kTokens) return;  // without a division
      first_m = tile % token_tiles(p) * kTokens, first_n = tile / token_tiles(p) * kRows;
    }
  };
  static __host__ __device__ int token_tiles(BlockwiseProblem const& p) { return (p.m + kTokens - 1) / kTokens; }
  static __host__ __device__ int tiles(BlockwiseProblem const& p) {
    return token_tiles(p) * ((p.n + kRows - 1) / kRows);
  }

  // Of a thread block: whole tiles, and last one whose K its cluster shares, where there is one.
  struct Share {
    int tiles, whole, shared;  // `shared`: that one, or from `tiles` on
    int all;                   // blocks of K

    __device__ explicit Share(BlockwiseProblem const& p)
        : tiles(BlockwiseSm90Tile::tiles(p)),
          whole(gridDim.y == 1 ? tiles : p.whole),
          shared(whole + blockIdx.x),
          all(p.k / kStep) {}
    __device__ bool has_shared() const { return shared < tiles; }
    __device__ bool is_split(int tile) const { return tile >= whole; }
    // While it is below `tiles`.
    __device__ int first() const { return whole_or_shared(blockIdx.x * gridDim.y + blockIdx.y); }
    __device__ int after(int tile) const {
      return is_split(tile) ? tiles : whole_or_shared(tile + gridDim.x * gridDim.y);
    }
    __device__ int first_step(int tile) const { return is_split(tile) ? blockIdx.y * all / gridDim.y : 0; }
    __device__ int steps(int tile) const {
      return is_split(tile) ? (blockIdx.y + 1) * all / gridDim.y - first_step(tile) : all;
    }

   private:
    __device__ int whole_or_shared(int tile) const { return tile < whole ? tile : shared; }
  };
};

}  // namespace epiloq::gemm
