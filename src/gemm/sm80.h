#pragma once

// MmaConfig x architecture x output type x epilogue -> CUTLASS 2.x kernel, for SM75 (m8n8k16) and SM80 (m16n8k32).

#include <type_traits>

#include "core/cuda_check.h"
#include "cute/tensor.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/default_gemm_universal_with_visitor.h"
#include "epilogue/lower_sm80.h"
#include "epiloq/device.h"
#include "gemm/config.h"
#include "gemm/problem.h"

namespace epiloq::gemm {

template <Arch>
struct MmaTraits;
template <>
struct MmaTraits<Arch::kSm75> {
  using Tag = cutlass::arch::Sm75;
  using Instruction = cutlass::gemm::GemmShape<8, 8, 16>;
};
template <>
struct MmaTraits<Arch::kSm80> {
  using Tag = cutlass::arch::Sm80;
  using Instruction = cutlass::gemm::GemmShape<16, 8, 32>;
};

template <Arch kArch, MmaConfig kConfig, class Out, class Epilogue>
struct MmaGemm {
  using Tile = cutlass::gemm::GemmShape<kConfig.tile.m, kConfig.tile.n, kConfig.tile.k>;
  using Warp = cutlass::gemm::GemmShape<kConfig.warp.m, kConfig.warp.n, kConfig.warp.k>;
  static constexpr int kAlignment = 16;         // int8 elements in a 128-bit copy
  static constexpr int kEpilogueAlignment = 4;  // fp32 elements in a 128-bit exchange through shared memory

  using ThreadMap = cutlass::epilogue::threadblock::OutputTileThreadLayout<Tile, Warp, float, kEpilogueAlignment, 1>;
  using Expr = decltype(Epilogue::template make<Out>({}));
  using Lowered = epilogue::Lower<epilogue::Sm80<ThreadMap>, Expr>;
  // 2.x has no store of its own behind a visitor tree: the root writes D.
  using Store =
      cutlass::epilogue::threadblock::VisitorAuxStore<ThreadMap, Out, cutlass::FloatRoundStyle::round_to_nearest,
                                                      cute::Stride<std::int64_t, cute::_1, cute::_0>>;
  using Root = cutlass::epilogue::threadblock::Sm80EVT<Store, typename Lowered::type>;
  using Kernel = typename cutlass::gemm::kernel::DefaultGemmWithVisitor<
      std::int8_t, cutlass::layout::RowMajor, cutlass::ComplexTransform::kNone, kAlignment, std::int8_t,
      cutlass::layout::ColumnMajor, cutlass::ComplexTransform::kNone, kAlignment, float, cutlass::layout::RowMajor,
      kEpilogueAlignment, std::int32_t, float, cutlass::arch::OpClassTensorOp, typename MmaTraits<kArch>::Tag, Tile,
      Warp, typename MmaTraits<kArch>::Instruction, Root, cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<8>,
      kConfig.stages, cutlass::arch::OpMultiplyAddSaturate, 1>::GemmKernel;
  using Adapter = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  static void launch(Problem const& p, int, Stream stream) {
    auto const expr = Epilogue::template make<Out>(p.operands);
    typename Root::Arguments const epilogue{Lowered::args(expr), {static_cast<Out*>(p.d), {p.stride_d, {}, {}}}};
    auto* const a = const_cast<std::int8_t*>(p.a);
    auto* const b = const_cast<std::int8_t*>(p.b);
    typename Adapter::Arguments const arguments{cutlass::gemm::GemmUniversalMode::kGemm,
                                                {p.m, p.n, p.k},
                                                1,
                                                epilogue,
                                                a,
                                                b,
                                                nullptr,
                                                nullptr,
                                                0,
                                                0,
                                                0,
                                                0,
                                                p.stride_a,
                                                p.stride_b,
                                                p.stride_d,
                                                p.stride_d};
    Adapter adapter;
    if (adapter(arguments, nullptr, stream) != cutlass::Status::kSuccess) {
      throw CudaError("epiloq.scaled_mm: the launch of a CUTLASS 2.x kernel failed");
    }
  }
};

}  // namespace epiloq::gemm
