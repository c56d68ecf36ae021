#pragma once

// At most 8 tokens, where reading the weight once is all the time there is. The warps of a block share its rows
// and take turns at the steps of K, each asking for its own steps, weights and tokens, some way ahead: no barrier
// stands in the main loop, and what is on its way fills memory's pipe. Blocks of a cluster share K where there are few
// rows.

#include "ops/weight_only_mm/configs.h"
#include "ops/weight_only_mm/finish.cuh"
#include "ops/weight_only_mm/warp.cuh"

namespace epiloq::ops::weight_only_mm {

struct StreamRing {
  StageLayout weights;
  int bytes;  // of a stage: weights and tokens
};

template <class T, int kBits, int kGroups, bool kOffsets, int kSlabs, int kWarps_, int kStages_, int kBlocks_>
struct Streaming {
  static constexpr int kTokens = kStreamTokens;
  static constexpr int kBlocks = kBlocks_;
  static constexpr int kWarps = kWarps_;
  static constexpr int kStages = kStages_;
  using W = Warp<T, kBits, kGroups, kOffsets, kSlabs, 1>;
  static constexpr int kRows = kSlabs * kSlab;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kSumBytes = kWarps * kTokens * (kRows + 4) * 4;

  // A lane asks for 8 columns of each 32, of one token.
  struct Tokens {
    T const* x;
    int k;  // columns from this lane's first to the last
    bool is_there;
    TokenPlace place;
    // Where it reads. Tokens that are not there have no place: what is multiplied then is the first's, and the sums are
    // dropped.
    TokenPlace read_at;

    __device__ __forceinline__ explicit Tokens(Problem const& p)
        : place(W::lane() / 4, W::lane() % 4), read_at(W::lane() % 8 < p.m ? W::lane() % 8 : 0, W::lane() / 8) {
      int const token = W::lane() / 4, column = W::lane() % 4 * 8;
      is_there = token < p.m;
      x = static_cast<T const*>(p.x) + (is_there ? token : 0) * p.stride_x + column;
      k = kept(p.weight.k - column);
    }

    __device__ __forceinline__ void ask(SharedAddress to, int step) const {
      if (!is_there) return;
      T const* const from = x + step * kStep;
      if (step * kStep + kStep - 24 <= k) {
#pragma unroll
        for (int b = 0; b < kStep / 32; ++b) copy16(to + place.at(b), from + 32 * b);
        return;
      }
#pragma unroll 1
      for (int b = 0; b < kStep / 32; ++b) {
        int const left = k - step * kStep - 32 * b;
        copy16(to + place.at(b), left > 0 ? from + 32 * b : x, min(max(left, 0), 8) * 2);
      }
    }

    __device__ __forceinline__ uint4 read(SharedAddress tokens, int block) const {
      return load_tokens(tokens + read_at.at(block));
    }
  };
};

// A column of blocks shares K.
template <class S, class T>
__global__ __launch_bounds__(S::kThreads, S::kBlocks) void stream_kernel(__grid_constant__ Problem const p,
                                                                         __grid_constant__ StreamRing const ring) {
  extern __shared__ __align__(16) std::uint8_t shared[];
  using W = typename S::W;
  constexpr int kWarps = S::kWarps, kStages = S::kStages;
  int const warp = threadIdx.x / 32, rank = blockIdx.y, split = gridDim.y;
  int const first_slab = blockIdx.x * (S::kRows / kSlab);
  int const all_steps = p.weight.padded_k / kStep;
  int const first_step = rank * all_steps / split, steps = (rank + 1) * all_steps / split - first_step;
  int const turns = (steps - warp + kWarps - 1) / kWarps;  // of this warp

  let_next_kernel_start();
  if (warp == 0) W::prefetch(p.weight, first_slab, first_step, steps, kEarlyBytes / (S::kRows / kSlab));
  wait_for_previous_kernel();

  typename W::Source const source(p.weight, ring.weights, first_slab);
  typename S::Tokens const tokens(p);
  std::uint8_t* const stages = shared + warp * kStages * ring.bytes;
  SharedAddress const to = shared_address(stages);
  int const tokens_at = ring.weights.bytes;
  auto const ask = [&](int turn, int at) {
    if (turn < turns) {
      int const step = first_step + warp + turn * kWarps;
      source.ask(ring.weights, to + at, step);
      tokens.ask(to + at + tokens_at, step);
    }
    commit_copies();
  };
#pragma unroll 1
  for (int turn = 0; turn < kStages - 1; ++turn) ask(turn, turn * ring.bytes);

  float sums[S::kRows / kSlab][1][4] = {};
  int read = 0, write = (kStages - 1) * ring.bytes;
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
    wait_for_copies<kStages - 2>();
    __syncwarp();  // a stage is the warp's; and all have read the one that is asked for next
    ask(turn + kStages - 1, write);
    std::uint8_t const* const stage = stages + read;
    W::multiply(sums, p.weight, ring.weights, stage,
                [&](int, int block) { return tokens.read(to + read + tokens_at, block); });
    write = read;
    read = read + ring.bytes == kStages * ring.bytes ? 0 : read + ring.bytes;
  }

  wait_for_copies<0>();
  __syncthreads();  // the ring makes room for the sums
  auto* const all_sums = reinterpret_cast<float*>(shared);
  W::store(all_sums + warp * S::kTokens * (S::kRows + 4), S::kRows + 4, sums);
  finish<T, S::kRows, S::kTokens, kWarps>(p, all_sums, blockIdx.x * S::kRows, 0, blockIdx.y, gridDim.y);
}

}  // namespace epiloq::ops::weight_only_mm
