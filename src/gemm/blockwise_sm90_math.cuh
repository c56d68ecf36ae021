#pragma once

// What empties the stages of blockwise_sm90.cuh: wgmma, and sums in float32.

#include <utility>

#include "gemm/blockwise_sm90_copies.cuh"
#include "gemm/matrix_loads.cuh"
#include "gemm/wgmma.cuh"

namespace epiloq::gemm {

template <int kColumns>
struct Sm90Products;
template <>
struct Sm90Products<64> {
  using FromShared = cute::SM90::GMMA::MMA_64x64x32_S32S8S8_SS_TN;
  using FromRegisters = cute::SM90::GMMA::MMA_64x64x32_S32S8S8_RS_TN;
};
template <>
struct Sm90Products<128> {
  using FromShared = cute::SM90::GMMA::MMA_64x128x32_S32S8S8_SS_TN;
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

  // Tokens that are multiplied at once, and how often that makes a tile.
  static constexpr int kColumns = kBits == 8 ? kTokens : 64, kRounds = kTokens / kColumns;
  static constexpr int kProducts = kStep / 32;  // wgmma's depth
  using Places = std::make_index_sequence<kColumns / 2>;
  using Sums = float[kTokens / 8][4];

  // What wgmma may be at work on: its sums, and weights that it takes from registers.
  struct Block {
    std::uint32_t d[kColumns / 2];
    std::uint32_t weights[kBits == 8 ? 1 : kProducts][4];
  };

  // Where a thread finds its group's share of the first stage. Shared memory by its own addresses, kept in registers,
  // those of barriers and wgmma in uniform ones: between two blocks' products there is no time to work them out.
  struct Share {
    SharedAddress full, empty;
    std::uint32_t weights, values;   // as descriptors have them: 64 rows of the weight; all tokens
    SharedAddress of_row, of_token;  // the parameters of the thread's first row and token
    SharedAddress unpacked;          // of 4-bit weights, the row that the lane names to ldmatrix
    int lane;

    __device__ Share(Shared const& shared, int group, int warp, int lane_)
        : full(uniform(shared_address(shared.full))),
          empty(uniform(shared_address(shared.empty))),
          weights(uniform(swizzled_address(shared_address(shared.weights) + group * kGroupRows * kRowBytes))),
          values(uniform(swizzled_address(shared_address(shared.values)))),
          of_row(kept(shared_address(shared.weight_parameters) + (group * kGroupRows + 16 * warp + lane_ / 4) * 4)),
          of_token(kept(shared_address(shared.token_parameters) + 2 * (lane_ % 4) * 4)),
          unpacked(kept(shared_address(shared.weights) + (group * kGroupRows + 16 * warp + lane_ % 8) * kRowBytes)),
          lane(lane_) {}
  };

  // A place in the ring of stages.
  struct Position {
    int stage = 0;
    std::uint32_t phase = 0;
    __device__ void advance() {
      stage = stage + 1 == kStages ? 0 : stage + 1;
      phase ^= stage == 0;
    }
  };

  template <std::size_t... kPlace>
  static __device__ __forceinline__ void product(Block& block, int i, std::uint64_t weights, std::uint64_t tokens,
                                                 std::index_sequence<kPlace...>) {
    using cute::SM90::GMMA::ScaleOut;
    auto const onto = i > 0 ? ScaleOut::One : ScaleOut::Zero;
    if constexpr (kBits == 8) {
      Sm90Products<kColumns>::FromShared::fma(weights, tokens, block.d[kPlace]..., onto);
    } else {
      auto const& w = block.weights[i];
      Sm90Products<kColumns>::FromRegisters::fma(w[0], w[1], w[2], w[3], tokens, block.d[kPlace]..., onto);
    }
  }

  static __device__ __forceinline__ void fence(Block& block) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) cute::warpgroup_fence_operand(block.d[i]);
    if constexpr (kBits == 4) {
#pragma unroll
      for (int i = 0; i < 4 * kProducts; ++i) cute::warpgroup_fence_operand(block.weights[i / 4][i % 4]);
    }
  }

  // As in blockwise.cuh; TMA's 64-byte swizzle is what ValuesB does there. Eight rows further the pattern is the same.
  static __device__ __forceinline__ void unpack(Block& block, Share const& of, int stage) {
    unsigned half[2][4];
    int const swizzle = (of.lane / 8 ^ of.lane % 8 / 2) << 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) load_matrices(half[h], of.unpacked + stage * kWeights + 8 * h * kRowBytes + swizzle);
    constexpr std::uint32_t kHigh = 0xf0f0f0f0u;
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
      block.weights[i][0] = half[0][i] << 4 & kHigh;
      block.weights[i][1] = half[1][i] << 4 & kHigh;
      block.weights[i][2] = half[0][i] & kHigh;
      block.weights[i][3] = half[1][i] & kHigh;
    }
  }

  // Starts to multiply 64 weight rows by a round of tokens over one block of K.
  static __device__ __forceinline__ void begin(Block& block, Share const& of, Position const& at, int round) {
    if (round == 0) wait_for_barrier(of.full + at.stage * 8, at.phase);
    if constexpr (kBits == 4) unpack(block, of, at.stage);
    auto const weights = of.weights + at.stage * (kWeights >> 4);
    auto const tokens = of.values + at.stage * (kValues >> 4) + round * (kColumns * kStep >> 4);
    fence(block);
    cute::warpgroup_arrive();
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
      constexpr int kStride = 32 >> 4;  // of a descriptor's address
      product(block, i, descriptor_of(weights + i * kStride), descriptor_of(tokens + i * kStride), Places{});
    }
    cute::warpgroup_commit_batch();
  }

  // Once all but kUnderWay of what was begun is done: its sums, de-quantised, onto the tile's. After the last round the
  // stage is given back.
  template <int kUnderWay>
  static __device__ __forceinline__ void finish(Sums& sums, Block& block, Share const& of, Position const& at,
                                                int round, bool has_offsets) {
    cute::warpgroup_wait<kUnderWay>();
    fence(block);
    accumulate(sums + round * kColumns / 8, block, of.of_row + at.stage * kWeightParameters,
               of.of_token + at.stage * kTokenParameters + round * kColumns * 4, has_offsets);
    if (round != kRounds - 1) return;
    __syncwarp();
    if (of.lane == 0) arrive_at_barrier(of.empty + at.stage * 8);
  }

  // scale_w sum scale_x + total_w offset_x, and with offsets offset_w scale_x sum(q_x), onto the sums.
  static __device__ __forceinline__ void accumulate(float (*sums)[4], Block const& block, SharedAddress of_row,
                                                    SharedAddress of_token, bool has_offsets) {
    constexpr int kEight = 8 * 4;  // bytes from a row or token to the eighth after it
    float scale[2], total[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      scale[h] = load_shared(of_row + h * kEight) * (kBits == 4 ? 0.0625f : 1.f);
      total[h] = load_shared(of_row + kRows * 4 + h * kEight);
    }
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      float2 const scale_x = load_shared_pair(of_token + j * kEight);
      float2 const offset_x = load_shared_pair(of_token + kTokens * 4 + j * kEight);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float const scaled = static_cast<float>(static_cast<int>(block.d[4 * j + i])) * scale[i / 2];
        sums[j][i] = fmaf(scaled, i % 2 == 0 ? scale_x.x : scale_x.y, sums[j][i]);
        sums[j][i] = fmaf(total[i / 2], i % 2 == 0 ? offset_x.x : offset_x.y, sums[j][i]);
      }
    }
    if (!has_offsets) return;
    float const offset[2] = {load_shared(of_row + 2 * kRows * 4), load_shared(of_row + 2 * kRows * 4 + kEight)};
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      float2 const sum_x = load_shared_pair(of_token + 2 * kTokens * 4 + j * kEight);
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[j][i] = fmaf(offset[i / 2], i % 2 == 0 ? sum_x.x : sum_x.y, sums[j][i]);
    }
  }

  static __device__ void wait_for_group(int group) {
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(kGroupThreads) : "memory");
  }

  // Turns D^T into rows of D, some tokens at a time.
  static __device__ void store(BlockwiseProblem const& p, Sums const& sums, float* mine, Tile const& tile, int group,
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

  // A tile's blocks of K. One is added up while the next, of the next round or stage, is under way. With two rounds
  // their number is even and the last branch never taken; without it ptxas 13.0 waits for each wgmma (C7514).
  static __device__ __forceinline__ void sum(Sums& sums, Share const& of, Position& at, int steps, bool has_offsets) {
    constexpr int kLast = kRounds - 1;
    Block one, other;  // of first rounds, of last ones
    Position ahead = at;
    auto const begin_next = [&](Block& block, int round) {
      begin(block, of, ahead, round);
      if (round == kLast) ahead.advance();
    };
    auto const finish_next = [&]<int kUnderWay>(Block& block, int round, std::integral_constant<int, kUnderWay>) {
      finish<kUnderWay>(sums, block, of, at, round, has_offsets);
      if (round == kLast) at.advance();
    };
    constexpr std::integral_constant<int, 1> kOne{};
    constexpr std::integral_constant<int, 0> kNone{};
    begin_next(one, 0);
    int left = steps * kRounds - 1;
    for (; left >= 2; left -= 2) {
      begin_next(other, kLast);
      finish_next(one, 0, kOne);
      begin_next(one, 0);
      finish_next(other, kLast, kOne);
    }
    if (left == 1) {
      begin_next(other, kLast);
      finish_next(one, 0, kOne);
      finish_next(other, kLast, kNone);
    } else {
      finish_next(one, 0, kNone);
    }
  }

  static __device__ void multiply_all(BlockwiseProblem const& p, Shared const& shared, int steps, int group) {
    int const warp = uniform(threadIdx.x % kGroupThreads / 32), lane = threadIdx.x % 32;
    Share const of(shared, group, warp, lane);
    Position at;
    for (int index = blockIdx.x; index < tiles(p); index += gridDim.x) {
      Sums sums = {};
      sum(sums, of, at, steps, p.kinds == kKinds);
      store(p, sums, shared.sums + group * Finish::kSharedBytes / 4, Tile(p, index), group, warp, lane);
    }
  }
};

}  // namespace epiloq::gemm
