#pragma once

// CUTLASS 2.x GEMM: CutlassMmaConfig x architecture x operand types x epilogue: int8 for SM75 (m8n8k16) and SM80
// (m16n8k32), FP8 for SM89 (m16n8k32). The only place where one is assembled.

#include <type_traits>

#include "core/cuda_check.h"
#include "cute/tensor.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/default_gemm_universal_with_visitor.h"
#include "epilogue/lower_sm80.h"
#include "epiloq/device.h"
#include "kernels/common/cutlass_types.h"
#include "kernels/common/tile_config.h"
#include "problems/gemm.h"

namespace epiloq::gemm {

template <Arch, bool kFastAccum>
struct MmaTraits;
template <>
struct MmaTraits<Arch::kSm75, false> {
  using Tag = cutlass::arch::Sm75;
  using Instruction = cutlass::gemm::GemmShape<8, 8, 16>;
  using Operator = cutlass::arch::OpMultiplyAddSaturate;
};
template <>
struct MmaTraits<Arch::kSm80, false> {
  using Tag = cutlass::arch::Sm80;
  using Instruction = cutlass::gemm::GemmShape<16, 8, 32>;
  using Operator = cutlass::arch::OpMultiplyAddSaturate;
};
template <bool kFastAccum>
struct MmaTraits<Arch::kSm89, kFastAccum> {
  using Tag = cutlass::arch::Sm89;
  using Instruction = cutlass::gemm::GemmShape<16, 8, 32>;
  using Operator = std::conditional_t<kFastAccum, cutlass::arch::OpMultiplyAddFastAccum, cutlass::arch::OpMultiplyAdd>;
};

template <Arch kArch, CutlassMmaConfig kConfig, Inputs kInputs, class Epilogue>
struct MmaGemm {
  using A = CutlassType<kInputs.a>;
  using B = CutlassType<kInputs.b>;
  using Out = epilogue::Element<typename Epilogue::Out>;
  using Accumulator = std::conditional_t<kInputs.is_float8(), float, std::int32_t>;
  using Traits = MmaTraits<kArch, kConfig.fast_accum>;
  using Tile = cutlass::gemm::GemmShape<kConfig.tile.m, kConfig.tile.n, kConfig.tile.k>;
  using Warp = cutlass::gemm::GemmShape<kConfig.warp.m, kConfig.warp.n, kConfig.warp.k>;
  static constexpr int kAlignment = 16;         // 8-bit elements in a 128-bit copy
  static constexpr int kEpilogueAlignment = 4;  // fp32 elements in a 128-bit exchange through shared memory

  using ThreadMap = cutlass::epilogue::threadblock::OutputTileThreadLayout<Tile, Warp, float, kEpilogueAlignment, 1>;
  using Expr = decltype(Epilogue::template make<typename Epilogue::Out>({}));
  using Lowered = epilogue::Lower<epilogue::Sm80<ThreadMap>, Expr>;
  // 2.x does not store after a visitor tree: the root writes D.
  using Store =
      cutlass::epilogue::threadblock::VisitorAuxStore<ThreadMap, Out, cutlass::FloatRoundStyle::round_to_nearest,
                                                      cute::Stride<std::int64_t, cute::_1, std::int64_t>>;
  using Root = cutlass::epilogue::threadblock::Sm80EVT<Store, typename Lowered::type>;
  using Kernel = typename cutlass::gemm::kernel::DefaultGemmWithVisitor<
      A, cutlass::layout::RowMajor, cutlass::ComplexTransform::kNone, kAlignment, B, cutlass::layout::ColumnMajor,
      cutlass::ComplexTransform::kNone, kAlignment, float, cutlass::layout::RowMajor, kEpilogueAlignment, Accumulator,
      float, cutlass::arch::OpClassTensorOp, typename Traits::Tag, Tile, Warp, typename Traits::Instruction, Root,
      cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<8>, kConfig.stages, typename Traits::Operator,
      1>::GemmKernel;
  using Adapter = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  static void launch(Problem const& p, int, Stream stream) {
    auto const expr = Epilogue::template make<typename Epilogue::Out>(p.operands);
    typename Root::Arguments const epilogue{Lowered::args(expr), {static_cast<Out*>(p.d), {p.stride_d, {}, p.batch_d}}};
    auto* const a = const_cast<void*>(p.a);
    auto* const b = const_cast<void*>(p.b);
    using Mode = cutlass::gemm::GemmUniversalMode;
    typename Adapter::Arguments const arguments{p.batches == 1 ? Mode::kGemm : Mode::kBatched,
                                                {p.m, p.n, p.k},
                                                p.batches,
                                                epilogue,
                                                a,
                                                b,
                                                nullptr,
                                                nullptr,
                                                p.batch_a,
                                                p.batch_b,
                                                0,
                                                p.batch_d,
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
