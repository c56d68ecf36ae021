#pragma once

// W4A16/W8A16 GEMV for at most 8 tokens, bound by reading the weight once. The warps of a CTA share its rows and
// alternate K steps, each with its own pipeline of weights and tokens: the main loop has no barrier, and enough loads
// are in flight to saturate memory. The CTAs of a cluster split K if there are few rows.

#include "kernels/common/ptx/cta.cuh"
#include "kernels/common/w4a16/config.h"
#include "kernels/common/w4a16/epilogue.cuh"
#include "kernels/common/w4a16/split_k.cuh"
#include "kernels/sm80/w4a16/warp_tile.cuh"

namespace epiloq::ops::weight_only_mm {

// Pipeline of a warp.
struct GemvPipeline {
  StageLayout weights;
  int bytes;  // of a stage: weights and tokens
  int stages;
  int scratch;                    // bytes behind the stages, for Products
  int received;                   // before all pipelines, for other CTAs' sums
  float const* factor = nullptr;  // of all sums, of each expert's; null: 1

  __host__ __device__ int warp_bytes() const { return stages * bytes + scratch; }
};

// Policy of a warp's products: the type of its sums, the largest number of tokens, the bytes of tokens in a stage and
// of scratch, how tokens are loaded and multiplied, and how sums are stored. Here 16-bit tokens on 16-bit tensor cores;
// for one or two tokens see gemv_integer.cuh.
template <class T, int kBits, int kGroups, bool kOffsets, int kPanels>
struct HalfProducts {
  static constexpr int kTokens = kGemvTokens;
  using W = Warp<T, kBits, kGroups, kOffsets, kPanels, 1>;
  using Sums = float[kPanels][1][4];
  static int token_bytes(int m) { return m * TokenLayout::kBytes; }
  static int scratch_bytes(int) { return 0; }

  // Eight lanes load one 128-byte line, half of a token's columns, then the other half; then those of the fourth token
  // after it. Whole lines, as every SM reads the same ones from L2.
  static constexpr int kAtOnce = 4, kLineColumns = 64;
  Problem const& p;
  int token, column;
  T const* x;
  SharedAddress offset, second_offset;
  // Where tokens are read from. Tokens past the last are read as the first, and their sums dropped.
  TokenLayout read_at;

  __device__ __forceinline__ explicit HalfProducts(Problem const& p_)
      : p(p_),
        token(W::lane() / 8),
        column(W::lane() % 8 * 8),
        x(static_cast<T const*>(p_.x) + token * p_.stride_x + column),
        offset(in_register(TokenLayout::of(token, W::lane() % 8))),
        second_offset(in_register(TokenLayout::of(token + kAtOnce, W::lane() % 8))),
        read_at(W::lane() % 8 < p_.m ? W::lane() % 8 : 0, W::lane() / 8) {}

  __device__ __forceinline__ void issue(SharedAddress to, int step) const {
    T const* const from = x + step * kStep;
    int const left = p.weight.k - step * kStep - column;
    if (token < p.m) issue_token(to + offset, from, left);
    if (token + kAtOnce < p.m) issue_token(to + second_offset, from + kAtOnce * p.stride_x, left);
  }

  // A lane's part of a token: the row has `left` columns from `from` on, after which zeros are stored.
  __device__ __forceinline__ void issue_token(SharedAddress to, T const* from, int left) const {
    if (left >= kLineColumns + 8) {
      cp_async16(to, from);
      cp_async16(to + kLineColumns * 2, from + kLineColumns);
      return;
    }
    void const* const any = p.x;
#pragma unroll
    for (int line = 0; line < kStep; line += kLineColumns) {
      cp_async16(to + line * 2, left > line ? from + line : any, min(max(left - line, 0), 8) * 2);
    }
  }

  __device__ __forceinline__ void multiply(Sums& sums, StageLayout const& layout, std::uint8_t const* stage,
                                           SharedAddress tokens, SharedAddress) const {
    W::multiply(sums, p.weight, layout, stage, [&](int, int block) { return load_tokens(tokens + read_at.at(block)); });
  }

  static __device__ __forceinline__ void store(float* target, int stride, Sums const& sums, float factor) {
    W::store(target, stride, sums, Fragment<T, kBits>::kUnit * factor);
  }
};

template <class Products_, int kPanels, int kWarps_, int kStages_, int kBlocks_>
struct Gemv {
  using Products = Products_;
  static constexpr int kWarps = kWarps_, kStages = kStages_, kBlocks = kBlocks_;
  static constexpr int kTokens = Products::kTokens, kRows = kPanels * kPanelRows, kThreads = kWarps * 32;
  static constexpr int kSumStride = sum_stride(kRows), kWarpSums = kTokens * kSumStride;
  static constexpr int kSumBytes = kWarps * kWarpSums * 4;
};

// Adds up the warps' sums, [kWarps][kTokens][kSumStride] in shared memory, and stores them to D; with split-K after a
// reduction through DSMEM, in which each CTA of the cluster completes and stores its own subtiles.
template <class T, class S>
__device__ void reduce_and_store(Problem const& p, float* sums, int first_row, SubtileReduction const& reduction) {
  int const elements = p.m * S::kRows;
  auto const sum_at = [&](int i) { return sums + i / S::kRows * S::kSumStride + i % S::kRows; };
  __syncthreads();
  for (int i = threadIdx.x; i < elements; i += S::kThreads) {
    float* const at = sum_at(i);
    float sum = 0.f;
#pragma unroll
    for (int warp = 0; warp < S::kWarps; ++warp) sum += at[warp * S::kWarpSums];
    if (reduction.split > 1) {
      *at = sum;
    } else {
      store<T>(p, i / S::kRows, first_row + i % S::kRows, sum);
    }
  }
  if (reduction.split == 1) return;
  __syncthreads();
  // Split-K: a lane has four rows of a token; partial sums of other CTAs' subtiles are sent to them.
  int const subtiles = gemv_subtiles(p.m, S::kRows), lane = threadIdx.x % 32;
  auto const for_subtiles = [&](auto const& act) {
    for (int i = threadIdx.x / 32; i < subtiles; i += S::kWarps) {
      act(Subtile::of(i, reduction.split), min(i * kSubtileElements + lane * 4, S::kTokens * S::kRows - 4));
    }
  };
  for_subtiles([&](Subtile const& subtile, int i) {
    if (!reduction.is_own(subtile)) reduction.send_partial(subtile, *reinterpret_cast<float4 const*>(sum_at(i)));
  });
  wait_dsmem_barrier(reduction.barrier);
  for_subtiles([&](Subtile const& subtile, int i) {
    if (!reduction.is_own(subtile)) return;
    float4 sum = *reinterpret_cast<float4 const*>(sum_at(i));
    for (int distance = 1; distance < reduction.split; ++distance) sum = sum + reduction.received(subtile, distance);
    if (i < elements) store_rows<T>(p, i / S::kRows, first_row + i % S::kRows, sum);
  });
}

// A CTA's tile of S::kRows weight rows by all tokens; the CTAs along y, a cluster, split K. Weights are loaded before
// pdl_wait (problems/weight_only.h), unless the caller has waited. `memory`: the CTA's from there on. A warp's
// pipeline: `to` is its first stage; `read` and `write` are the byte offsets of the stage to multiply and of the one to
// refill.
template <class S, class T>
__device__ __forceinline__ void multiply_gemv(Problem const& p, GemvPipeline const& pipeline, int row_tile,
                                              float const* factor, std::uint8_t* memory) {
  using Products = typename S::Products;
  std::uint8_t* const shared = memory + pipeline.received;
  constexpr int kWarps = S::kWarps, kAhead = S::kStages - 1;
  int const warp = threadIdx.x / 32, rank = blockIdx.y, split = gridDim.y;
  int const all_steps = p.weight.padded_k / kStep;
  int const first_step = rank * all_steps / split, steps = (rank + 1) * all_steps / split - first_step;
  int const iterations = (steps - warp + kWarps - 1) / kWarps;  // of this warp
  // CTAs begin at different steps, so that they read different tokens from L2 at a time. A prime, of which the number
  // of steps is unlikely to be a multiple.
  constexpr int kApart = 23;
  int const begin = row_tile * kApart % steps;
  auto const step_of = [&](int iteration) {
    int const step = begin + warp + iteration * kWarps;
    return first_step + (step < steps ? step : step - steps);
  };

  SubtileReduction const reduction(rank, split, shared_address(memory), shared_address(memory) + kReceivedBarrierBytes);
  if (split > 1) {
    if (threadIdx.x == 0) reduction.expect(gemv_subtiles(p.m, S::kRows));
    __syncthreads();
    cluster_arrive();
  }
  pdl_trigger();
  typename Products::W::Source const source(p.weight, pipeline.weights, row_tile * (S::kRows / kPanelRows));
  std::uint8_t* const stages = shared + warp * pipeline.warp_bytes();
  SharedAddress const to = shared_address(stages), scratch = to + S::kStages * pipeline.bytes;
  int const tokens_at = pipeline.weights.bytes, early = min(kAhead, iterations);
#pragma unroll 1
  for (int iteration = 0; iteration < early; ++iteration)
    source.issue(pipeline.weights, to + iteration * pipeline.bytes, step_of(iteration));
  if (split > 1) {
    __syncwarp();
    cluster_wait();
  }
  pdl_wait();

  // One cp.async group per K step, empty past the last one, so that a constant counts the groups to wait for. The first
  // also holds the early weights of all stages.
  Products const products(p);
#pragma unroll 1
  for (int iteration = 0; iteration < kAhead; ++iteration) {
    if (iteration < iterations) products.issue(to + iteration * pipeline.bytes + tokens_at, step_of(iteration));
    cp_async_commit();
  }
  typename Products::Sums sums = {};
  int read = 0, write = kAhead * pipeline.bytes;
#pragma unroll 1
  for (int iteration = 0; iteration < iterations; ++iteration) {
    cp_async_wait<kAhead - 1>();
    __syncwarp();  // a stage is the warp's own, and all lanes have read the one to be refilled
    if (iteration + kAhead < iterations) {
      source.issue(pipeline.weights, to + write, step_of(iteration + kAhead));
      products.issue(to + write + tokens_at, step_of(iteration + kAhead));
    }
    cp_async_commit();
    products.multiply(sums, pipeline.weights, stages + read, to + read + tokens_at, scratch);
    write = read;
    read = read + pipeline.bytes == S::kStages * pipeline.bytes ? 0 : read + pipeline.bytes;
  }

  cp_async_wait<0>();
  __syncthreads();  // the sums replace the pipelines
  auto* const all_sums = reinterpret_cast<float*>(shared);
  Products::store(all_sums + warp * S::kWarpSums, S::kSumStride, sums, factor != nullptr ? __ldg(factor) : 1.f);
  reduce_and_store<T, S>(p, all_sums, row_tile * S::kRows, reduction);
}

// A CTA per S::kRows weight rows along x.
template <class S, class T>
__global__ __launch_bounds__(S::kThreads, S::kBlocks) void gemv_kernel(__grid_constant__ Problem const p,
                                                                       __grid_constant__ GemvPipeline const pipeline) {
  multiply_gemv<S, T>(p, pipeline, blockIdx.x, pipeline.factor, dynamic_smem);
}

}  // namespace epiloq::ops::weight_only_mm
