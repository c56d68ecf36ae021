#pragma once

// W4A16/W8A16 GEMM with mma.sync: a CTA multiplies 32 weight rows per warp by a tile of tokens, which its warps share
// through shared memory. Each weight is dequantised by one warp, in registers; each step's tokens are copied once. The
// CTAs of a cluster may split K.

#include "kernels/common/w4a16/config.h"
#include "kernels/common/w4a16/epilogue.cuh"
#include "kernels/sm80/w4a16/warp_tile.cuh"

namespace epiloq::ops::weight_only_mm {

template <class T, int kBits, int kGroups, bool kOffsets, int kWarps_, int kTokens_, int kStages_, int kBlocks_,
          class F = Fragment<T, kBits>, int kMostColumns = kStep>
struct Tiled {
  static constexpr int kWarps = kWarps_;
  static constexpr int kTokens = kTokens_;
  static constexpr int kStages = kStages_;
  static constexpr int kBlocks = kBlocks_;  // per SM
  static constexpr int kPanels = 2;         // per warp
  using W = Warp<T, kBits, kGroups, kOffsets, kPanels, kTokens / 8, F, kMostColumns>;
  static constexpr int kRows = kWarps * kPanels * kPanelRows;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kChunks = TokenLayout::kBytes / 16;
  static constexpr int kSumBytes = sum_bytes(kRows, kTokens);

  static __host__ __device__ constexpr int stage_bytes(StageLayout const& weights) {
    return kWarps * weights.bytes + kTokens * TokenLayout::kBytes;
  }

  // A thread copies one chunk of every kApart-th token.
  struct Tokens {
    static constexpr int kApart = kThreads / kChunks;
    T const* x;
    std::int64_t apart;
    int k;       // columns from this thread's chunk to the last
    int tokens;  // from this thread's first to the last
    int to;

    __device__ __forceinline__ Tokens(Problem const& p, int first_token) {
      int const token = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
      x = static_cast<T const*>(p.x) + (first_token + token) * p.stride_x + chunk * 8;
      apart = kApart * p.stride_x;
      k = p.weight.k - chunk * 8;
      tokens = p.m - first_token - token;
      to = TokenLayout::of(token, chunk);
    }

    // Chunks past the last token or column are zero-filled; `valid_address` is then never read.
    __device__ __forceinline__ void issue(void const* valid_address, SharedAddress tile, int step) const {
      int const bytes = min(max(k - step * kStep, 0), 8) * 2;
      T const* from = x + step * kStep;
#pragma unroll
      for (int i = 0; i < kTokens / kApart; ++i, from += apart) {
        bool const is_valid = i * kApart < tokens && bytes > 0;
        cp_async16(tile + to + i * kApart * TokenLayout::kBytes, is_valid ? from : valid_address, is_valid ? bytes : 0);
      }
    }
  };
};

// A CTA's tile: tokens along x, rows along z. Functions, as each use then reads the index anew: no register keeps it.
template <class S>
struct GridTile {
  __device__ __forceinline__ int first_token() const { return blockIdx.x * S::kTokens; }
  __device__ __forceinline__ int row_tile() const { return blockIdx.z; }
  __device__ __forceinline__ float factor() const { return 1.f; }  // of all sums
};

// CTAs along y split K. make_tokens(first token, first step) returns what issues the CTA's tokens, step by step.
template <class S, class T, class MakeTokens, class CtaTile = GridTile<S>>
__device__ __forceinline__ void multiply_tile(Problem const& p, StageLayout const& layout, std::uint8_t* shared,
                                              MakeTokens make_tokens, CtaTile cta = {}) {
  using W = typename S::W;
  constexpr int kStages = S::kStages;
  int const warp = threadIdx.x / 32, rank = blockIdx.y, split = gridDim.y;
  int const first_panel = cta.row_tile() * (S::kRows / kPanelRows) + warp * S::kPanels;
  int const all_steps = p.weight.padded_k / kStep;
  int const first_step = rank * all_steps / split, end = (rank + 1) * all_steps / split;
  int const stage_bytes = S::stage_bytes(layout), tokens_at = S::kWarps * layout.bytes;

  pdl_trigger();
  typename W::Source const source(p.weight, layout, first_panel);
  SharedAddress const to = shared_address(shared);
  int const early = min(kStages - 1, end - first_step);
#pragma unroll 1
  for (int stage = 0; stage < early; ++stage) {
    source.issue(layout, to + stage * stage_bytes + warp * layout.bytes, first_step + stage);
  }
  pdl_wait();

  auto tokens = make_tokens(cta.first_token(), first_step);
  auto const issue = [&](int step, int at) {
    if (step < end) {
      source.issue(layout, to + at + warp * layout.bytes, step);
      tokens.issue(p.x, to + at + tokens_at, step);
    }
    cp_async_commit();
  };
#pragma unroll 1
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (stage < early) tokens.issue(p.x, to + stage * stage_bytes + tokens_at, first_step + stage);
    cp_async_commit();
  }

  float sums[S::kPanels][S::kTokens / 8][4] = {};
  TokenLayout const token_layout;
  int read = 0, write = (kStages - 1) * stage_bytes;
#pragma unroll 1
  for (int step = first_step; step < end; ++step) {
    cp_async_wait<kStages - 2>();
    __syncthreads();  // all copies have landed, and the stage to be refilled has been read
    issue(step + kStages - 1, write);
    std::uint8_t const* const stage = shared + read;
    W::multiply(sums, p.weight, layout, stage + warp * layout.bytes, [&](int tile, int block) {
      return load_tokens(to + read + tokens_at + token_layout.at(block) + tile * TokenLayout::kTile);
    });
    write = read;
    read = read + stage_bytes == kStages * stage_bytes ? 0 : read + stage_bytes;
  }

  cp_async_wait<0>();
  __syncthreads();  // the sums replace the stages
  auto* const all_sums = reinterpret_cast<float*>(shared);
  W::store(all_sums + warp * S::kPanels * kPanelRows, sum_stride(S::kRows), sums, W::F::kUnit * cta.factor());
  finish<T, S::kRows, S::kTokens>(p, all_sums, cta.row_tile() * S::kRows, cta.first_token(), blockIdx.y, gridDim.y);
}

template <class S, class T>
__global__ __launch_bounds__(S::kThreads, S::kBlocks) void tiled_kernel(__grid_constant__ Problem const p,
                                                                        __grid_constant__ StageLayout const layout) {
  extern __shared__ __align__(kSharedLine) std::uint8_t shared[];
  multiply_tile<S, T>(p, layout, shared, [&](int token, int) { return typename S::Tokens(p, token); });
}

}  // namespace epiloq::ops::weight_only_mm
