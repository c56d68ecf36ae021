#pragma once

// SM90: the weight-only kernel for a mixture of experts with few tokens each (grouped_packed_mm, packed_fp4_mm). The
// tiles and pipeline are those of the WGMMA kernel, the main loop is the decode kernel's: each warp converts its own
// panels, multiplies them with mma.sync, and waits for no other.

#include "kernels/common/w4a16/fp4_step.cuh"
#include "kernels/sm90/w4a16/expert_tiles.cuh"
#include "kernels/sm90/w4a16/w4a16_decode_tma.cuh"

namespace epiloq::ops::grouped_packed_mm {

// The kernel of a row of kExpertDecodeRows and a format. Integers have scales of T.
template <int kRow, class T_, Format kFormat_>
struct ExpertDecode {
  using T = T_;
  static constexpr Format kFormat = kFormat_;
  static constexpr wo::DecodeConfig kConfig = decode_config(kRow, kFormat);
  static constexpr int kChunkTokens = kDecodeChunk, kMostChunks = kConfig.tokens / kChunkTokens;
  template <int kTokens>
  using Tile = wo::Decode<T, bits_of(kFormat), groups_of(kFormat), kConfig.m_groups, kConfig.k_groups, kConfig.panels,
                          kTokens, kConfig.blocks>;
  // Two K groups exchange sums, each warp those of one panel, for two tiles in turn.
  static_assert(kConfig.k_groups == 1 || (kConfig.k_groups == 2 && kConfig.panels == 2));
  static constexpr int kExchangeFloats = kConfig.k_groups == 1 ? 0 : kConfig.tokens * wo::kPanelRows;  // of a warp
  static constexpr int kExchangeBytes = 2 * kConfig.warps() * kExchangeFloats * 4;
};

// multiply(offset of a stage) for each K step of a tile that is the K group's. All warps release each stage, as a
// tile's first also announces it.
template <int kKGroups, class Multiply>
__device__ __forceinline__ void for_expert_steps(ExpertParams const& params, ExpertPipeline& pipeline, int k_group,
                                                 Multiply const& multiply) {
#pragma unroll 1
  for (int step = 0; step < params.steps; ++step) {
    gemm::mbarrier_wait(pipeline.full + pipeline.state.stage * 8, pipeline.state.phase);
    if (kKGroups == 1 || step % kKGroups == k_group) multiply(pipeline.state.stage * params.stage.bytes);
    __syncwarp();
    if (threadIdx.x % 32 == 0) gemm::mbarrier_arrive(pipeline.empty + pipeline.state.stage * 8);
    pipeline.state.advance(params.stages);
  }
}

// Sums of a warp's panels, in the layout of mma.sync's. `memory` is of the stages.
template <class G, class C>
struct ExpertDecodeMainloop : wo::DecodeMainloop<C> {
  using Base = wo::DecodeMainloop<C>;
  using Base::Base;
  using typename Base::Sums;
  static constexpr float kUnit = Base::F::kUnit;

  __device__ __forceinline__ void multiply_all(Sums& sums, ExpertPipeline& pipeline, int k_group,
                                               std::uint8_t const*) const {
    bool const has_zeros = this->params.p.weight.zero != nullptr;
    has_zeros ? multiply_all<true>(sums, pipeline, k_group) : multiply_all<false>(sums, pipeline, k_group);
  }

 private:
  template <bool kHasZeros>
  __device__ __forceinline__ void multiply_all(Sums& sums, ExpertPipeline& pipeline, int k_group) const {
    auto const& params = static_cast<ExpertParams const&>(this->params);
    for_expert_steps<C::kKGroups>(params, pipeline, k_group, [&](int at) {
      this->template multiply<true, kHasZeros>(sums, pipeline.stages + at);
    });
  }
};

template <class G, class C>
  requires(is_fp4(G::kFormat))
struct ExpertDecodeMainloop<G, C> : wo::DecodeMainloop<C> {
  using Base = wo::DecodeMainloop<C>;
  using Base::Base;
  using W = wo::Fp4Step<typename C::T, C::kGroups, C::kOwnPanels, C::kTiles>;
  using Sums = typename W::Sums;
  static constexpr float kUnit = W::F::kUnit;

  __device__ __forceinline__ void multiply_all(Sums& sums, ExpertPipeline& pipeline, int k_group,
                                               std::uint8_t const* memory) const {
    auto const& params = static_cast<ExpertParams const&>(this->params);
    std::uint8_t const* const q = memory + this->first_panel * W::kPanelBytes;
    std::uint8_t const* const scales = memory + params.stage.scales_at + this->first_panel * W::kScaleBytes;
    for_expert_steps<C::kKGroups>(params, pipeline, k_group, [&](int at) {
      W::multiply(sums, {q + at, scales + at}, [&](int tile, int block) {
        wo::Word x[4];
        this->load_tokens(x, pipeline.stages + at, tile, block);
        return uint4{x[0], x[1], x[2], x[3]};
      });
    });
  }
};

// Named barrier of two warps.
__device__ __forceinline__ void sync_pair(int barrier) { asm volatile("bar.sync %0, 64;" ::"r"(barrier) : "memory"); }

// What a consumer warp keeps from tile to tile.
struct ExpertDecoder {
  ExpertParams const& params;
  ExpertPipeline pipeline;
  std::uint8_t* stages;
  int warp;
  bool is_odd = false;  // number of tiles before

  // With two K groups: adds the other's sums of the panel that this one stores, its `k_group`-th. The buffer that is
  // written was read two tiles ago, before the other warp came to the barrier of the tile in between.
  template <class G, class C, class Sums>
  __device__ __forceinline__ void exchange(float (&own)[C::kTiles][4], Sums const& sums, int k_group) const {
    constexpr int kValues = C::kTiles * 4;
    auto* const buffers = reinterpret_cast<float*>(stages + params.stages * params.stage.bytes);
    int const lane = threadIdx.x % 32, other = k_group == 0 ? warp + C::kMGroups : warp - C::kMGroups;
    auto const buffer_of = [&](int of) { return buffers + (is_odd * C::kWarps + of) * G::kExchangeFloats + lane; };
    float* const to = buffer_of(other);
    float const* const from = buffer_of(warp);
#pragma unroll
    for (int i = 0; i < kValues; ++i) to[i * 32] = k_group == 0 ? sums[1][i / 4][i % 4] : sums[0][i / 4][i % 4];
    sync_pair(1 + warp % C::kMGroups);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      own[i / 4][i % 4] = (k_group == 0 ? sums[0][i / 4][i % 4] : sums[1][i / 4][i % 4]) + from[i * 32];
    }
  }

  // Multiplies and stores a tile of at most kChunks chunks.
  template <class G, int kChunks = G::kMostChunks>
  __device__ __forceinline__ void multiply(ExpertTile const& tile) {
    if constexpr (kChunks > 1) {
      if (tile.chunks < kChunks) return multiply<G, kChunks - 1>(tile);
    }
    using C = TileOf<G, kChunks>;
    using Mainloop = ExpertDecodeMainloop<G, C>;
    using T = typename G::T;
    int const k_group = warp / C::kMGroups;
    Mainloop const mainloop(params, warp % C::kMGroups);
    typename Mainloop::Sums sums = {};
    mainloop.multiply_all(sums, pipeline, k_group, stages);
    wo::Problem const product = product_of<T>(params, tile);
    float const unit = Mainloop::kUnit * factor_of(params, tile);
    auto const store = [&](int panel, float const(&sums)[C::kTiles][4]) {
      wo::DirectRows<T> const rows(product, (tile.first_panel + mainloop.first_panel + panel) * wo::kPanelRows);
#pragma unroll
      for (int j = 0; j < C::kTiles; ++j) rows.store(tile.first_token + 8 * j, sums[j], unit);
    };
    if constexpr (C::kKGroups == 1) {
#pragma unroll
      for (int s = 0; s < C::kOwnPanels; ++s) store(s, sums[s]);
    } else {
      float own[C::kTiles][4];
      exchange<G, C>(own, sums, k_group);
      store(k_group, own);
      is_odd = !is_odd;
    }
  }
};

template <class G>
__global__ __launch_bounds__(TileOf<G>::kThreads, TileOf<G>::kResident) void expert_decode_kernel(
    __grid_constant__ ExpertParams const params) {
  using C = TileOf<G>;
  extern __shared__ unsigned char memory[];
  __shared__ ExpertShared shared;
  unsigned char* const stages = memory + wo::padding_to_atom(shared_address(memory));
  int const warp = warp_uniform(threadIdx.x / 32);
  if (threadIdx.x == 0) {
    wo::prefetch_maps(params);
    shared.init(params.stages, C::kWarps);
  }
  __syncthreads();
  pdl_trigger();
  if (warp == C::kWarps) return ExpertProducer<G>(params, shared, shared_address(stages)).run();
  ExpertDecoder decoder{params, ExpertPipeline(shared, shared_address(stages)), stages, warp};
  for_expert_tiles(shared, decoder.pipeline, [&](ExpertTile const& tile) { decoder.template multiply<G>(tile); });
}

template <int kRow, DType kX, Format kFormat>
void launch_expert_decode(Problem const& p, int tiles, int, int device, Stream stream) {
  using G = ExpertDecode<kRow, CudaType<kX>, kFormat>;
  launch_expert_tiles<G>(&expert_decode_kernel<G>, p, tiles, G::kConfig.blocks, G::kExchangeBytes, device, stream);
}

}  // namespace epiloq::ops::grouped_packed_mm
