#pragma once

// WgmmaConfig x types x epilogue -> SM90 kernel. The one place where a CUTLASS 3.x GEMM is put together.

#include <tuple>
#include <utility>

#include "core/cuda_check.h"
#include "core/cutlass_types.h"
#include "cute/tensor.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "epilogue/lower_sm90.h"
#include "epiloq/device.h"
#include "gemm/config.h"
#include "gemm/params_cache.h"
#include "gemm/problem.h"

namespace epiloq::gemm {

template <Schedule>
struct ScheduleTags;
template <>
struct ScheduleTags<Schedule::kWarpSpecialized> {
  using Mainloop = cutlass::gemm::KernelTmaWarpSpecialized;
  using FastAccum = cutlass::gemm::KernelTmaWarpSpecializedFP8FastAccum;
  using Epilogue = cutlass::epilogue::TmaWarpSpecialized;
};
template <>
struct ScheduleTags<Schedule::kPingpong> {
  using Mainloop = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
  using FastAccum = cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8FastAccum;
  using Epilogue = cutlass::epilogue::TmaWarpSpecialized;
};
template <>
struct ScheduleTags<Schedule::kCooperative> {
  using Mainloop = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
  using FastAccum = cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8FastAccum;
  using Epilogue = cutlass::epilogue::TmaWarpSpecializedCooperative;
};

// A main loop that asks L2 for the first of a block's weights, and for what the epilogue reads beside them, while it
// may still have to wait for the kernel before it. Prefetching into L2 is safe even if that kernel writes the weights:
// its writes arrive there. For swapped operands (weights first) and one tile of tokens, where a call is bound by
// reading them, and where the epilogue's cold vectors, one after the other, would be a tenth of its time.
template <class Base, int kRows, int kBytes>
struct EarlyWeights : Base {
  struct Vector {  // an element for each row of the weights; null where there is none
    char const* begin = nullptr;
    int bytes = 0;  // an element
  };
  struct Early {
    Vector vectors[3];
    int rows = 0;
  };
  struct Arguments : Base::Arguments {
    Early early{};
  };
  struct Params : Base::Params {
    Early early{};
  };

  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const& shape, Arguments const& arguments, void* workspace) {
    return {Base::to_underlying_arguments(shape, arguments, workspace), arguments.early};
  }

  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    Base::prefetch_tma_descriptors(params);
    constexpr int kBox = 128;  // bytes of K in one TMA box, the widest swizzle; and of a line of L2
    int const row = (blockIdx.x + blockIdx.y * gridDim.x) * kRows;
    for (Vector const& vector : params.early.vectors) {
      char const* const end = vector.begin + min(row + kRows, params.early.rows) * vector.bytes;
      for (char const* line = vector.begin + row * vector.bytes; line < end; line += kBox) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
      }
    }
    CUTLASS_PRAGMA_NO_UNROLL
    for (int k = 0; k < kBytes / kRows; k += kBox) {
      cute::SM90_TMA_LOAD::PREFETCH::copy(params.tma_load_a.get_tma_descriptor(), k, row, 0);
    }
  }
};

template <WgmmaConfig kConfig, Types kTypes, class Epilogue>
struct Sm90Gemm {
  using Left = CutlassType<kConfig.swap ? kTypes.b : kTypes.a>;
  using Right = CutlassType<kConfig.swap ? kTypes.a : kTypes.b>;
  using Out = CutlassType<kTypes.out>;
  using Accumulator = std::conditional_t<kTypes.is_float8(), float, std::int32_t>;
  using Tile = cute::Shape<cute::Int<kConfig.tile.m>, cute::Int<kConfig.tile.n>, cute::Int<kConfig.tile.k>>;
  using Cluster = cute::Shape<cute::Int<kConfig.cluster_m>, cute::Int<kConfig.cluster_n>, cute::_1>;
  using Tags = ScheduleTags<kConfig.schedule>;
  using MainloopTag = std::conditional_t<kConfig.fast_accum, typename Tags::FastAccum, typename Tags::Mainloop>;
  using Target = std::conditional_t<kConfig.swap, epilogue::Transposed<epilogue::Sm90<Tile>>, epilogue::Sm90<Tile>>;
  using Expr = decltype(Epilogue::template make<Out>({}));
  using Lowered = epilogue::Lower<Target, Expr>;
  using LayoutD = std::conditional_t<kConfig.swap, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>;
  static constexpr int kAlignment8 = 16;  // elements of 8 bits in the 16 bytes that TMA wants
  static constexpr int kAlignment16 = 8;

  // CUTLASS's own choice is 32 columns, which must divide the tile.
  using EpilogueTile =
      std::conditional_t<kConfig.tile.n % 32 == 0 || kConfig.tile.n == 16,
                         cutlass::epilogue::collective::EpilogueTileAuto, cute::Shape<cute::_64, cute::_16>>;
  using CollectiveEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster, EpilogueTile, Accumulator, float, void,
      LayoutD, kAlignment16, Out, LayoutD, kAlignment16, typename Tags::Epilogue, typename Lowered::type>::CollectiveOp;
  // A second block on an SM starts streaming while the first one ends.
  static constexpr int kSharedMemory = 232448;  // bytes a block may have on SM90
  static constexpr int kReserved = kConfig.blocks_per_sm == 1 ? 0 : kSharedMemory / 2 + 1024;
  using PlainMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Left, cutlass::layout::RowMajor, kAlignment8, Right,
      cutlass::layout::ColumnMajor, kAlignment8, Accumulator, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<
          static_cast<int>(sizeof(typename CollectiveEpilogue::SharedStorage)) + kReserved>,
      MainloopTag>::CollectiveOp;
  using CollectiveMainloop =
      std::conditional_t<(kConfig.early_bytes > 0), EarlyWeights<PlainMainloop, kConfig.tile.m, kConfig.early_bytes>,
                         PlainMainloop>;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, CollectiveMainloop,
                                                      CollectiveEpilogue, void>;
  using Adapter = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  static typename Adapter::Arguments arguments_of(Problem const& p, int device) {
    using cute::Int;
    auto const expr = Epilogue::template make<Out>(p.operands);
    typename Kernel::StrideD stride_d{};
    cute::get<kConfig.swap ? 1 : 0>(stride_d) = p.stride_d;
    cute::get<2>(stride_d) = p.batch_d;
    auto const first = std::tuple(p.a, p.stride_a, p.batch_a), second = std::tuple(p.b, p.stride_b, p.batch_b);
    auto const [left, stride_left, batch_left] = kConfig.swap ? second : first;
    auto const [right, stride_right, batch_right] = kConfig.swap ? first : second;
    typename Adapter::Arguments arguments{cutlass::gemm::GemmUniversalMode::kGemm,
                                          {kConfig.swap ? p.n : p.m, kConfig.swap ? p.m : p.n, p.k, p.batches},
                                          {static_cast<Left const*>(left),
                                           {stride_left, Int<1>{}, batch_left},
                                           static_cast<Right const*>(right),
                                           {stride_right, Int<1>{}, batch_right}},
                                          {Lowered::args(expr), nullptr, {}, static_cast<Out*>(p.d), stride_d}};
    // The main loop adds sums up in fp32 at the end of a tile of K, or never: its interval must be a whole tile.
    if constexpr (kTypes.is_float8() && !kConfig.fast_accum) {
      constexpr int kInstructionDepth = 32;
      arguments.mainloop.mma_promotion_interval = kConfig.tile.k / kInstructionDepth;
    }
    if constexpr (kConfig.early_bytes > 0) {
      auto const vector = [](auto const* begin, bool is_vector, std::size_t bytes) {
        using Vector = typename CollectiveMainloop::Vector;
        return is_vector ? Vector{reinterpret_cast<char const*>(begin), static_cast<int>(bytes)} : Vector{};
      };
      auto const& o = p.operands;
      arguments.mainloop.early = {{vector(o.scale_b, o.scale_b_is_vector, sizeof(float)),
                                   vector(o.azp_adj, o.azp_adj != nullptr, sizeof(std::int32_t)),
                                   vector(static_cast<char const*>(o.bias), o.bias != nullptr, sizeof(Out))},
                                  p.n};
    }
    arguments.hw_info.device_id = device;
    arguments.hw_info.sm_count = device_properties(device).sm_count;
    return arguments;
  }

  static typename Kernel::Params& params_of(Problem const& p, int device) {
    thread_local ParamsCache<Problem, typename Kernel::Params> cache;
    return cache.get(cache_key(p.a, p.b, p.d), p, device,
                     [&] { return Kernel::to_underlying_arguments(arguments_of(p, device), nullptr); });
  }

  static void launch(Problem const& p, int device, Stream stream) {
    static PerDevice prepared;
    prepared.once(device, [] {
      cuda_check(cudaFuncSetAttribute(cutlass::device_kernel<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      Kernel::SharedStorageSize),
                 "asking for shared memory");
    });
    constexpr bool kDependentLaunch = true;  // its prologue overlaps the tail of the kernel before it
    if (Adapter::run(params_of(p, device), stream, nullptr, kDependentLaunch) != cutlass::Status::kSuccess) {
      throw CudaError("epiloq.scaled_mm: the launch of an SM90 kernel failed");
    }
  }
};

}  // namespace epiloq::gemm
