#pragma once

// Consumer warpgroups of the weight-only WGMMA GEMM: weights become fragments of the first operand in registers, exact
// differences q - zero; the tensor cores accumulate a scale group, whose sums are promoted with the scale. Or the
// differences are multiplied by the scale and rounded, and the tensor cores accumulate all of K. A main loop of other
// weights derives from this one and passes itself, for its own `multiply_step` and `store`.

#include <cute/arch/mma_sm90.hpp>
#include <type_traits>
#include <utility>

#include "kernels/common/ptx/cp_async.cuh"
#include "kernels/common/ptx/wgmma.cuh"
#include "kernels/common/w4a16/convert.cuh"
#include "kernels/common/w4a16/epilogue.cuh"
#include "kernels/sm90/w4a16/w4a16_producer.cuh"
#include "kernels/sm90/w4a16/w4a16_stage_loads.cuh"

namespace epiloq::ops::weight_only_mm {

template <class C, class Derived = void>
struct WgmmaMainloop {
  using Self = std::conditional_t<std::is_void_v<Derived>, WgmmaMainloop, Derived>;
  using T = typename C::T;
  using X = typename C::X;
  using F = Fragment<X, C::kBits>;
  static constexpr float kUnit = F::kUnit;  // of the sums
  using Element = std::conditional_t<
      std::is_same_v<X, __half>, cutlass::half_t,
      std::conditional_t<std::is_same_v<X, __nv_bfloat16>, cutlass::bfloat16_t, cutlass::float_e4m3_t>>;
  static constexpr int kTokenBytes = C::Tokens::kBytes, kInstruction = instruction_depth(kTokenBytes);
  using Instruction =
      decltype(cute::SM90::GMMA::rs_op_selector<
               Element, Element, float, cute::Shape<cute::_64, cute::Int<C::kTokens>, cute::Int<kInstruction>>>());
  // Columns dequantised at a time, within one scale group, as many as the registers hold: fewer, larger parts wait
  // less often.
  static constexpr int kTokensByWholeTiles = C::kConsumerWarpgroups < 4 ? 64 : C::kConsumerWarpgroups == 4 ? 32 : 16;
  static constexpr bool kWholeTiles = C::kTokens <= kTokensByWholeTiles * 2 / kTokenBytes;
  static constexpr int kSubtileDepth = C::kBits == 4 && C::kGroups < 4 && kWholeTiles ? 64 : 32;
  static constexpr int kSubtiles = kPadding / kSubtileDepth, kInSubtile = kSubtileDepth / kInstruction;
  static constexpr int kSubtilesOfGroup = kSubtiles / C::kGroups;
  // Per thread: rows r and r + 8 of its warp's panel, two neighbours of each 8 tokens.
  static constexpr int kSums = C::kTokens / 2;
  using Sums = float[C::kBlocks][kSums];
  // Promote at once: the compiler would defer it into the next product, for which there may be no registers.
  static constexpr bool kAddsAtOnce = C::kGroups == 4 && C::kBits == 8;
  using Fragments = Word[kInSubtile][4];

  // A lane's view of a stage; `panel` is of the warpgroup's first 64 rows, the next 64 are four panels further.
  struct Stage {
    SharedAddress weights, scales, zeros;
    std::uint64_t tokens;
  };

  TileParams const& params;
  int lane, panel;
  int first;      // byte offset in a panel at which the lane reads
  int parameter;  // of a scale group of the panel, row g
  typename F::Zero symmetric;

  __device__ WgmmaMainloop(TileParams const& params_, int warpgroup, int warp)
      : params(params_),
        lane(threadIdx.x % 32),
        panel(warpgroup * C::kBlocks * 4 + warp),
        first(in_register(lane_at(C::kBits, lane, 0))),
        parameter(in_register(panel * C::kGroups * kPanelRows + lane / 4 * 2)),
        symmetric(F::zero(1 << (C::kBits - 1), 1 << (C::kBits - 1))) {}

  __device__ __forceinline__ Stage stage_of(SharedAddress address) const {
    return {address + panel * panel_bytes(C::kBits), address + params.stage.scales_at, address + params.stage.zeros_at,
            gemm::swizzled_descriptor(address + params.stage.tokens_at)};
  }

  // Product of two pairs of T, each rounded.
  static __device__ __forceinline__ Word times(Word a, Word b) {
    Word result;
    if constexpr (std::is_same_v<T, __half>) {
      asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    } else {
      asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    }
    return result;
  }

  // Loads the packed tile that a subtile's fragments come from, unless the previous subtile loaded it.
  __device__ __forceinline__ void load(Word (&words)[4], Stage const& stage, int subtile) const {
    int const column = subtile % kSubtiles * kSubtileDepth;
    if (word_of(C::kBits, column) != 0) return;
    gemm::load_shared(
        words, stage.weights + subtile / kSubtiles * 4 * panel_bytes(C::kBits) + first + lane_at(C::kBits, 0, column));
  }

  __device__ __forceinline__ void make(Fragments& a, Word const (&words)[4], int subtile,
                                       typename F::Zero const& zero) const {
#pragma unroll
    for (int i = 0; i < kInSubtile; ++i) {
      F::make(a[i], words + word_of(C::kBits, subtile * kSubtileDepth + i * kInstruction), zero);
    }
  }

  // Parameters of a panel and scale group, rows g and g + 8.
  __device__ __forceinline__ int parameters_at(int subtile) const {
    return parameter + (subtile / kSubtiles * 4 * C::kGroups + subtile % kSubtiles / kSubtilesOfGroup) * kPanelRows;
  }
  __device__ __forceinline__ typename F::Zero zero_of(Stage const& stage, int subtile) const {
    if (params.p.weight.zero == nullptr) return symmetric;
    Word const both = load_byte_pair(stage.zeros + parameters_at(subtile));
    return F::zero(both & 0xff, both >> 8);
  }
  __device__ __forceinline__ float2 scale_of(Stage const& stage, int subtile) const {
    return load_scale_pair(stage.scales, parameters_at(subtile), params.p.weight.scale_dtype);
  }

  // The same as T, rows g and g + 8, each twice.
  struct Factor {
    Word low, high;
  };
  __device__ __forceinline__ Factor factor_of(Stage const& stage, int subtile) const {
    Word const both = gemm::load_shared_bits(stage.scales + parameters_at(subtile) * 2);
    return {__byte_perm(both, 0, 0x1010), __byte_perm(both, 0, 0x3232)};
  }
  static __device__ __forceinline__ void scale(Fragments& a, Factor const& factor) {
#pragma unroll
    for (int i = 0; i < kInSubtile * 4; ++i) a[i / 4][i % 4] = times(a[i / 4][i % 4], i % 2 ? factor.high : factor.low);
  }

  template <std::size_t... kIndices>
  static __device__ __forceinline__ void wgmma_fma(float (&product)[kSums], Word const (&a)[4], std::uint64_t tokens,
                                                   bool onto, std::index_sequence<kIndices...>) {
    using cute::SM90::GMMA::ScaleOut;
    Instruction::fma(a[0], a[1], a[2], a[3], tokens, product[kIndices]..., onto ? ScaleOut::One : ScaleOut::Zero);
  }

  // Issues the product of a subtile, accumulating or from zero.
  static __device__ __forceinline__ void begin(float (&product)[kSums], Fragments& a, Stage const& stage, int subtile,
                                               bool onto) {
    fence(product);
#pragma unroll
    for (int i = 0; i < kInSubtile * 4; ++i) cute::warpgroup_fence_operand(a[i / 4][i % 4]);
    cute::warpgroup_arrive();
#pragma unroll
    for (int i = 0; i < kInSubtile; ++i) {
      int const column = subtile % kSubtiles * kSubtileDepth + i * kInstruction;
      wgmma_fma(product, a[i], stage.tokens + (tokens_at(C::kTokens, column, kTokenBytes) >> 4), onto || i > 0,
                std::make_index_sequence<kSums>{});
    }
    cute::warpgroup_commit_batch();
  }

  static __device__ __forceinline__ void fence(float (&product)[kSums]) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) cute::warpgroup_fence_operand(product[i]);
  }

  static __device__ __forceinline__ void add(float (&sums)[kSums], float const (&product)[kSums], float2 scale) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = fmaf(i % 4 < 2 ? scale.x : scale.y, product[i], sums[i]);
  }

  // A K step, software-pipelined: a subtile is dequantised while the previous one is multiplied, and its integers are
  // loaded before that.
  __device__ __forceinline__ void multiply(Sums& sums, Stage const& stage) const {
    constexpr int kAll = C::kBlocks * kSubtiles;
    float product[kSums];
    Fragments a[2];
    Word words[4];
    typename F::Zero zero = zero_of(stage, 0);
    load(words, stage, 0);
    make(a[0], words, 0, zero);
#pragma unroll
    for (int subtile = 0; subtile < kAll; ++subtile) {
      int const next = subtile + 1;
      bool const ends_group = next % kSubtilesOfGroup == 0;
      if (next < kAll) load(words, stage, next);
      begin(product, a[subtile % 2], stage, subtile, subtile % kSubtilesOfGroup != 0);
      if (next < kAll) {
        if (ends_group) zero = zero_of(stage, next);
        cute::warpgroup_wait<1>();  // of the fragments that are overwritten
        make(a[next % 2], words, next, zero);
      }
      if (ends_group) {
        float2 const scale = scale_of(stage, subtile);
        cute::warpgroup_wait<0>();
        fence(product);
        add(sums[subtile / kSubtiles], product, scale);
        if constexpr (kAddsAtOnce) fence(sums[subtile / kSubtiles]);
      }
    }
  }

  // The same with rounded weights: the tensor cores always have the next subtile queued. They are not kept in flight
  // past the end of a step: the compiler would then wait for every product.
  __device__ __forceinline__ void multiply_rounded(Sums& sums, Stage const& stage) const {
    static_assert(C::kBlocks == 1);
    Fragments a[2];
    Word words[4];
    typename F::Zero zero;
    Factor factor;
    load(words, stage, 0);
#pragma unroll
    for (int subtile = 0; subtile < kSubtiles; ++subtile) {
      if (subtile % kSubtilesOfGroup == 0) {
        zero = zero_of(stage, subtile);
        factor = factor_of(stage, subtile);
      }
      cute::warpgroup_wait<1>();  // of the fragments that are overwritten
      make(a[subtile % 2], words, subtile, zero);
      scale(a[subtile % 2], factor);
      if (subtile + 1 < kSubtiles) load(words, stage, subtile + 1);
      begin(sums[0], a[subtile % 2], stage, subtile, true);
    }
    cute::warpgroup_wait<0>();
    fence(sums[0]);
  }

  __device__ __forceinline__ void multiply_step(Sums& sums, Stage const& stage) const {
    if constexpr (C::kRounds) {
      multiply_rounded(sums, stage);
    } else {
      multiply(sums, stage);
    }
  }

  // A tile's K steps, every kKGroups-th from `next` on, which is then the next tile's first. A stage is released once
  // it has been multiplied.
  __device__ void multiply_all(Sums& sums, SharedAddress full, SharedAddress empty, SharedAddress stages, int steps,
                               int& next, gemm::DynamicPipelineState& state) const {
#pragma unroll 1
    for (; next < steps; next += C::kKGroups) {
      gemm::mbarrier_wait(full + state.stage * 8, state.phase);
      static_cast<Self const&>(*this).multiply_step(sums, stage_of(stages + state.stage * params.stage.bytes));
      __syncwarp();
      if (lane == 0) gemm::mbarrier_arrive(empty + state.stage * 8);
      state.advance(params.stages, C::kKGroups);
    }
    next -= steps;
  }

  // Reduction over K groups: writes this thread's sums to where the first group's same thread reads them.
  static __device__ __forceinline__ void write(Sums const& sums, float* exchange) {
#pragma unroll
    for (int i = 0; i < C::kBlocks * kSums; ++i) exchange[i * C::kKGroupThreads] = sums[i / kSums][i % kSums];
  }
  static __device__ __forceinline__ void add(Sums& sums, float const* exchange) {
#pragma unroll
    for (int i = 0; i < C::kBlocks * kSums; ++i) sums[i / kSums][i % kSums] += exchange[i * C::kKGroupThreads];
  }

  __device__ __forceinline__ void store_directly(typename C::WorkTile const& work, Sums const& sums) const {
#pragma unroll
    for (int block = 0; block < C::kBlocks; ++block) {
      DirectRows<T> const rows(params.p, (work.first_panel + panel + block * 4) * kPanelRows);
#pragma unroll
      for (int i = 0; i < kSums; i += 4) {
        Self::store(params, rows, work.first_token + i * 2, sums[block] + i);
      }
    }
  }

  // Four sums: rows g and g + 8, two tokens each.
  static __device__ __forceinline__ void store(TileParams const& params, DirectRows<T> const& rows, int first_token,
                                               float const* four) {
    if constexpr (kTokenBytes == 1) {
      float2 const scale = C::Tokens::scale_of(params, first_token + 2 * rows.t);
      float const scaled[] = {four[0] * scale.x, four[1] * scale.y, four[2] * scale.x, four[3] * scale.y};
      rows.store(first_token, scaled, kUnit);
    } else {
      rows.store(first_token, four, kUnit);
    }
  }
};

}  // namespace epiloq::ops::weight_only_mm
