#pragma once

// SM90 W4A16/W8A16 decode kernel for small M: mma.sync main loop over a TMA pipeline filled by one thread
// (w4a16_prologue.cuh). Each warp multiplies its own panels and K steps independently. Compared with the GEMV, tokens
// are loaded once per CTA; compared with WGMMA, each warp has more rows, so there are fewer instructions per weight.

#include "kernels/common/ptx/ldmatrix.cuh"
#include "kernels/common/w4a16/convert.cuh"
#include "kernels/common/w4a16/epilogue.cuh"
#include "kernels/common/w4a16/split_k.cuh"
#include "kernels/sm90/w4a16/w4a16_prologue.cuh"
#include "kernels/sm90/w4a16/w4a16_stage_loads.cuh"

namespace epiloq::ops::weight_only_mm {

template <class T_, int kBits_, int kGroups_, int kMGroups_, int kKGroups_, int kOwnPanels_, int kTokens_,
          int kResident_>
struct Decode : TileCopies<kBits_, kGroups_, kPanelRows * kOwnPanels_ * kMGroups_, kTokens_,
                           most_stages(DecodeConfig{}), kMGroups_, MatrixTokens> {
  using T = T_;
  static constexpr int kMGroups = kMGroups_, kKGroups = kKGroups_, kOwnPanels = kOwnPanels_, kTiles = kTokens_ / 8;
  static constexpr int kWarps = kMGroups * kKGroups, kConsumerThreads = 32 * kWarps, kThreads = kConsumerThreads + 32;
  static constexpr int kResident = kResident_;
  static constexpr bool kReallocatesRegisters = false, kReducesInStages = false, kIsPersistent = false;
  static constexpr int kSumStride = sum_stride(Decode::kRows);
  static constexpr int kKGroupSums = kTokens_ * kSumStride;
};

// Main loop of one warp.
template <class C>
struct DecodeMainloop {
  using T = typename C::T;
  using F = Fragment<T, C::kBits>;
  using Sums = float[C::kOwnPanels][C::kTiles][4];
  static constexpr DType kDType = std::is_same_v<T, __half> ? DType::kFloat16 : DType::kBFloat16;
  static constexpr int kBlock = 32;  // columns whose tokens are loaded at a time
  static constexpr int kVectorBlocks = depth(C::kBits) / kBlock, kGroupBlocks = kPadding / C::kGroups / kBlock;

  TileParams const& params;
  int first_panel;  // the CTA's first
  int weights, even,
      odd;        // byte offsets in a stage: the lane's in the first panel, and its token line by even and odd blocks
  int parameter;  // of the first panel and group, row g
  typename F::Zero symmetric;

  __device__ __forceinline__ DecodeMainloop(TileParams const& params_, int warpgroup)
      : params(params_),
        first_panel(warpgroup * C::kOwnPanels),
        symmetric(F::zero(1 << (C::kBits - 1), 1 << (C::kBits - 1))) {
    int const lane = threadIdx.x % 32, token = lane % 8;
    weights = in_register(first_panel * panel_bytes(C::kBits) + lane * 16);
    even = in_register(params.stage.tokens_at + token * kLine + (lane / 8 ^ token) * 16);
    odd = even ^ 64;
    parameter = in_register(first_panel * C::kGroups * kPanelRows + lane / 4 * 2);
  }

  // Loads 32 columns of eight tokens; TMA has swizzled the 16-byte units of each line.
  __device__ __forceinline__ void load_tokens(Word (&x)[4], SharedAddress stage, int tile, int block) const {
    int const line = block / 2 * C::kTokens * kLine + tile * 8 * kLine;
    gemm::ldmatrix_x4(x, stage + (block % 2 ? odd : even) + line);
  }

  // Parameters of a panel and scale group.
  __device__ __forceinline__ int parameters_at(int s, int group) const {
    return parameter + (s * C::kGroups + group) * kPanelRows;
  }
  template <bool kHasZeros>
  __device__ __forceinline__ typename F::Zero zero_of(SharedAddress stage, int s, int group) const {
    if (!kHasZeros) return symmetric;
    Word const both = load_byte_pair(stage + params.stage.zeros_at + parameters_at(s, group));
    return F::zero(both & 0xff, both >> 8);
  }
  template <bool kSameType>
  __device__ __forceinline__ float2 scale_of(SharedAddress stage, int s, int group) const {
    DType const dtype = kSameType ? kDType : params.p.weight.scale_dtype;
    return load_scale_pair(stage + params.stage.scales_at, parameters_at(s, group), dtype);
  }

  // The tensor cores accumulate a scale group, whose sums are then added with the scale.
  template <bool kSameType, bool kHasZeros>
  __device__ __forceinline__ void multiply(Sums& sums, SharedAddress stage) const {
    Word words[C::kOwnPanels][4];
#pragma unroll
    for (int group = 0; group < C::kGroups; ++group) {
      typename F::Zero zero[C::kOwnPanels];
#pragma unroll
      for (int s = 0; s < C::kOwnPanels; ++s) zero[s] = zero_of<kHasZeros>(stage, s, group);
      Sums part = {};
#pragma unroll
      for (int block = group * kGroupBlocks; block < (group + 1) * kGroupBlocks; ++block) {
        if (block % kVectorBlocks == 0) {
#pragma unroll
          for (int s = 0; s < C::kOwnPanels; ++s) {
            gemm::load_shared(
                words[s], stage + weights + s * panel_bytes(C::kBits) + block / kVectorBlocks * tile_bytes(C::kBits));
          }
        }
        multiply_block(part, words, stage, block, zero);
      }
#pragma unroll
      for (int s = 0; s < C::kOwnPanels; ++s) {
        float2 const scale = scale_of<kSameType>(stage, s, group);
#pragma unroll
        for (int i = 0; i < C::kTiles * 4; ++i) {
          float& sum = sums[s][i / 4][i % 4];
          sum = fmaf(i % 4 < 2 ? scale.x : scale.y, part[s][i / 4][i % 4], sum);
        }
      }
    }
  }

  __device__ __forceinline__ void multiply_block(Sums& part, Word const (&words)[C::kOwnPanels][4], SharedAddress stage,
                                                 int block, typename F::Zero const (&zero)[C::kOwnPanels]) const {
    Word x[C::kTiles][4];
#pragma unroll
    for (int tile = 0; tile < C::kTiles; ++tile) load_tokens(x[tile], stage, tile, block);
#pragma unroll
    for (int half = 0; half < kBlock / kInstruction; ++half) {
#pragma unroll
      for (int s = 0; s < C::kOwnPanels; ++s) {
        Word a[4];
        F::make(a, words[s] + word_of(C::kBits, block * kBlock + half * kInstruction), zero[s]);
#pragma unroll
        for (int tile = 0; tile < C::kTiles; ++tile) {
          mma<T>(part[s][tile], a, x[tile][2 * half], x[tile][2 * half + 1], part[s][tile]);
        }
      }
    }
  }

  // Writes the sums to shared memory, [K group][token][row].
  __device__ __forceinline__ void store(float* group_sums, Sums const& sums) const {
    int const lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < C::kOwnPanels * C::kTiles * 4; ++i) {
      int const token = i / 4 % C::kTiles * 8 + lane % 4 * 2 + i % 2;
      int const row = (first_panel + i / 4 / C::kTiles) * kPanelRows + i % 4 / 2 * 8 + lane / 4;
      group_sums[token * C::kSumStride + row] = sums[i / 4 / C::kTiles][i / 4 % C::kTiles][i % 4] * F::kUnit;
    }
  }
};

// Reduces over K groups, four rows of a token per lane, and over the CTAs that split K.
template <class C>
__device__ __forceinline__ void finish_decode(TileParams const& params, SubtileReduction const& reduction, float* sums,
                                              int first_row) {
  int const elements = params.tokens * C::kRows, lane = threadIdx.x % 32;
  auto const sums_at = [&](int i) {
    return reinterpret_cast<float4*>(sums + i / C::kRows * C::kSumStride + i % C::kRows);
  };
  auto const sum_over_k_groups = [&](int i) {
    float4 sum = *sums_at(i);
#pragma unroll
    for (int k_group = 1; k_group < C::kKGroups; ++k_group) sum = sum + sums_at(i)[k_group * C::kKGroupSums / 4];
    return sum;
  };
  auto const store = [&](int i, float4 const& sum) {
    if (i < elements) store_rows<typename C::T>(params.p, i / C::kRows, first_row + i % C::kRows, sum);
  };
  if (reduction.split == 1) {
    for (int i = threadIdx.x * 4; i < elements; i += C::kConsumerThreads * 4) store(i, sum_over_k_groups(i));
    return;
  }
  int const subtiles = gemv_subtiles(params.tokens, C::kRows);
  int const each = (subtiles + C::kWarps - 1) / C::kWarps, begin = threadIdx.x / 32 * each;
  Subtile const first = Subtile::of(begin, reduction.split);
  auto const for_subtiles = [&](auto const& act) {  // consecutive subtiles; every CTA owns as many of each warp
    Subtile subtile = first;
    for (int i = begin, end = min(begin + each, subtiles); i < end; ++i) {
      act(subtile, i * kSubtileElements + lane * 4);
      subtile = subtile.next(reduction.split);
    }
  };
  for_subtiles([&](Subtile const& subtile, int i) {
    float4 const sum = sum_over_k_groups(i);
    if (reduction.is_own(subtile)) {
      *sums_at(i) = sum;
    } else {
      reduction.send_partial(subtile, sum);
    }
  });
  wait_dsmem_barrier(reduction.barrier);
  for_subtiles([&](Subtile const& subtile, int i) {
    if (!reduction.is_own(subtile)) return;
    float4 sum = *sums_at(i);
    for (int distance = 1; distance < reduction.split; ++distance) sum = sum + reduction.received(subtile, distance);
    store(i, sum);
  });
}

// The K steps of one K group.
template <class C, bool kSameType, bool kHasZeros>
__device__ __forceinline__ void multiply_steps_of(DecodeMainloop<C> const& mainloop,
                                                  typename DecodeMainloop<C>::Sums& sums, TileParams const& params,
                                                  typename C::Shared const& shared, SharedAddress stages, int k_group,
                                                  int steps) {
  gemm::DynamicPipelineState state{k_group, 0};  // every K group has at least one stage
#pragma unroll 1
  for (int step = k_group; step < steps; step += C::kKGroups) {
    gemm::mbarrier_wait(shared.full + state.stage * 8, state.phase);
    mainloop.template multiply<kSameType, kHasZeros>(sums, stages + state.stage * params.stage.bytes);
    __syncwarp();
    if (threadIdx.x % 32 == 0) gemm::mbarrier_arrive(shared.empty + state.stage * 8);
    state.advance(params.stages, C::kKGroups);
  }
}

// One loop per kind of parameters: branches inside a single loop are slower.
template <class C>
__device__ __forceinline__ void multiply_steps(DecodeMainloop<C> const& mainloop,
                                               typename DecodeMainloop<C>::Sums& sums, TileParams const& params,
                                               typename C::Shared const& shared, SharedAddress stages, int k_group,
                                               int steps) {
  Weight const& w = params.p.weight;
  bool const has_zeros = w.zero != nullptr;
  if (w.scale_dtype != DecodeMainloop<C>::kDType) {
    if (has_zeros) return multiply_steps_of<C, false, true>(mainloop, sums, params, shared, stages, k_group, steps);
    return multiply_steps_of<C, false, false>(mainloop, sums, params, shared, stages, k_group, steps);
  }
  if (has_zeros) return multiply_steps_of<C, true, true>(mainloop, sums, params, shared, stages, k_group, steps);
  multiply_steps_of<C, true, false>(mainloop, sums, params, shared, stages, k_group, steps);
}

// One tile per CTA along x; the CTAs along y split its K.
template <class C>
__global__ __launch_bounds__(C::kThreads, C::kResident) void decode_kernel(__grid_constant__ TileParams const params) {
  extern __shared__ unsigned char memory[];
  __shared__ std::uint64_t barriers[barrier_bytes(C::kMostStages) / 8];
  typename C::Shared const shared(barriers);
  unsigned char* const stages = memory + padding_to_atom(shared_address(memory));
  SharedAddress const first_stage = shared_address(stages);
  int const warp = warp_uniform(threadIdx.x / 32);
  if (warp == C::kWarps) return run_producer<C>(params, shared, first_stage, 0);
  if (threadIdx.x < 32 && gemm::elect_one()) prefetch_maps(params);
  bool const is_split = gridDim.y > 1;
  SubtileReduction const reduction(blockIdx.y, gridDim.y, shared.received, first_stage + params.exchange_at);
  if (is_split && threadIdx.x == 0) reduction.expect(gemv_subtiles(params.tokens, C::kRows));
  wait_for_start<C>();
  if (is_split) cluster_arrive();
  pdl_trigger();
  if (is_split) cluster_wait();
  pdl_wait();

  typename C::WorkTile const work(params, blockIdx.x);
  int const k_group = warp / C::kMGroups;
  DecodeMainloop<C> const mainloop(params, warp % C::kMGroups);
  typename DecodeMainloop<C>::Sums sums = {};
  multiply_steps(mainloop, sums, params, shared, first_stage, k_group, work.steps);
  auto* const all_sums = reinterpret_cast<float*>(stages);
  sync_consumers<C>();  // all stages have been read
  mainloop.store(all_sums + k_group * C::kKGroupSums, sums);
  sync_consumers<C>();
  finish_decode<C>(params, reduction, all_sums, work.first_panel * kPanelRows);
}

}  // namespace epiloq::ops::weight_only_mm
