#pragma once

// SM90 CUTLASS 3.x GEMM: CutlassWgmmaConfig x operand types x epilogue. The only place where one is assembled.

#include <tuple>
#include <utility>

#include "core/cuda_check.h"
#include "cute/tensor.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "epilogue/lower_sm90.h"
#include "epiloq/device.h"
#include "kernels/common/cutlass_types.h"
#include "kernels/common/params_cache.h"
#include "kernels/common/tile_config.h"
#include "problems/gemm.h"

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

template <CutlassWgmmaConfig kConfig, Inputs kInputs, class Epilogue>
struct Sm90Gemm {
  using Left = CutlassType<kConfig.swap ? kInputs.b : kInputs.a>;
  using Right = CutlassType<kConfig.swap ? kInputs.a : kInputs.b>;
  using Out = epilogue::Element<typename Epilogue::Out>;
  using Accumulator = std::conditional_t<kInputs.is_float8(), float, std::int32_t>;
  using Tile = cute::Shape<cute::Int<kConfig.tile.m>, cute::Int<kConfig.tile.n>, cute::Int<kConfig.tile.k>>;
  using Cluster = cute::Shape<cute::Int<kConfig.cluster_m>, cute::Int<kConfig.cluster_n>, cute::_1>;
  using Tags = ScheduleTags<kConfig.schedule>;
  using MainloopTag = std::conditional_t<kConfig.fast_accum, typename Tags::FastAccum, typename Tags::Mainloop>;
  using Target = std::conditional_t<kConfig.swap, epilogue::Transposed<epilogue::Sm90<Tile>>, epilogue::Sm90<Tile>>;
  using Expr = decltype(Epilogue::template make<typename Epilogue::Out>({}));
  using Lowered = epilogue::Lower<Target, Expr>;
  using LayoutD = std::conditional_t<kConfig.swap, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>;
  static constexpr int kAlignment8 = 16;  // elements of 8 bits in the 16 bytes to which TMA aligns
  static constexpr int kAlignment16 = 8;

  // CUTLASS's default is 32 columns, which must divide the tile.
  using EpilogueTile =
      std::conditional_t<kConfig.tile.n % 32 == 0 || kConfig.tile.n == 16,
                         cutlass::epilogue::collective::EpilogueTileAuto, cute::Shape<cute::_64, cute::_16>>;
  using CollectiveEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster, EpilogueTile, Accumulator, float, void,
      LayoutD, kAlignment16, Out, LayoutD, kAlignment16, typename Tags::Epilogue, typename Lowered::type>::CollectiveOp;
  using CollectiveMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Left, cutlass::layout::RowMajor, kAlignment8, Right,
      cutlass::layout::ColumnMajor, kAlignment8, Accumulator, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename CollectiveEpilogue::SharedStorage))>,
      MainloopTag>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, CollectiveMainloop,
                                                      CollectiveEpilogue, void>;
  using Adapter = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  static typename Adapter::Arguments arguments_of(Problem const& p, int device) {
    using cute::Int;
    auto const expr = Epilogue::template make<typename Epilogue::Out>(p.operands);
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
    // FP32 promotion happens at the end of a K tile or never: the interval must be a whole tile.
    if constexpr (kInputs.is_float8() && !kConfig.fast_accum) {
      constexpr int kInstructionDepth = 32;
      arguments.mainloop.mma_promotion_interval = kConfig.tile.k / kInstructionDepth;
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
    prepared.allow_shared(&cutlass::device_kernel<Kernel>, Kernel::SharedStorageSize, device);
    constexpr bool kDependentLaunch = true;  // its prologue overlaps the tail of the preceding kernel
    if (Adapter::run(params_of(p, device), stream, nullptr, kDependentLaunch) != cutlass::Status::kSuccess) {
      throw CudaError("epiloq.scaled_mm: the launch of an SM90 kernel failed");
    }
  }
};

}  // namespace epiloq::gemm
