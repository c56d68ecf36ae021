#include "dispatch/groupwise_mm/launch.h"

#include <type_traits>
#include <utility>

#include "epiloq/error.h"

#if EPILOQ_HAS_CUDA
#include "core/cuda_check.h"
#include "dispatch/groupwise_mm/tables.h"
#include "kernels/launch/groupwise_mm.h"
#endif

namespace epiloq::ops::groupwise_mm {

#if EPILOQ_HAS_CUDA
namespace {

using gemm::Scales;

#if EPILOQ_HAS_SM90
int column_of(DType out) { return out == DType::kFloat16 ? 0 : out == DType::kBFloat16 ? 1 : 2; }

template <int kRow, Scales kScales, DType kOut>
constexpr gemm::GroupwiseLaunch group_launch_of() {
  if constexpr (is_compiled(kScales, kOut)) {
    return &Sm90PerGroup<kRow, kScales, kOut>::launch;
  } else {
    return nullptr;
  }
}

template <Scales kScales, std::size_t... kRows>
gemm::GroupwiseLaunch sm90_launch(int row, DType out, std::index_sequence<kRows...>) {
  static constexpr gemm::GroupwiseLaunch kTable[][3] = {{group_launch_of<kRows, kScales, DType::kFloat16>(),
                                                         group_launch_of<kRows, kScales, DType::kBFloat16>(),
                                                         group_launch_of<kRows, kScales, DType::kFloat32>()}...};
  return kTable[row][column_of(out)];
}
template <Scales kScales>
gemm::GroupwiseLaunch sm90_launch(int row, DType out) {
  return sm90_launch<kScales>(row, out, std::make_index_sequence<group_tiles<kScales>().size()>{});
}

// The types of D and tiles that each epilogue is compiled for, as in CMakeLists.txt: float32 is of groupwise_mm, which
// only scales, and so are experts.
template <int kRow, DType kElement, DType kOut, class Epilogue>
constexpr gemm::GroupwiseLaunch row_launch_of() {
  constexpr bool kOnlyScales = kOut == DType::kFloat32 || is_for_experts(row_tile<kElement>(kRow));
  if constexpr (kOnlyScales && !std::is_same_v<Epilogue, epilogue::Scaled>) {
    return nullptr;
  } else {
    return &Sm90PerRow<kRow, kElement, kOut, Epilogue>::launch;
  }
}

template <DType kElement, class Epilogue, std::size_t... kRows>
gemm::GroupwiseLaunch rows_launch(int row, DType out, std::index_sequence<kRows...>) {
  static constexpr gemm::GroupwiseLaunch kTable[][3] = {
      {row_launch_of<kRows, kElement, DType::kFloat16, Epilogue>(),
       row_launch_of<kRows, kElement, DType::kBFloat16, Epilogue>(),
       row_launch_of<kRows, kElement, DType::kFloat32, Epilogue>()}...};
  return kTable[row][column_of(out)];
}
#endif

[[noreturn]] void refuse() {
  throw Unsupported("epiloq.groupwise_mm: this build lacks the kernels asked for; see EPILOQ_ARCHS");
}

template <Scales kScales, DType kElement>
void launch_mma_row(int row, gemm::GroupwiseProblem const& p, DType out, int device, Stream stream) {
  auto* const run = row == 0 ? &Mma<0, kScales, kElement>::launch : &Mma<1, kScales, kElement>::launch;
  run(p, out, device, stream);
}

void launch_mma(int row, gemm::GroupwiseProblem const& p, DType element, DType out, int device, Stream stream) {
  [[maybe_unused]] bool const per_row_scales = p.depth != gemm::kGroupDepth,
                              columns = p.scale_b.shift == gemm::GroupScales::kPerRow;
#if EPILOQ_HAS_SM80
  if (element == DType::kInt8) return launch_mma_row<Scales::kPerRowScales, DType::kInt8>(row, p, out, device, stream);
#endif
#if EPILOQ_HAS_SM89
  constexpr DType kE4M3 = DType::kFloat8E4M3;
  if (element == kE4M3 && per_row_scales)
    return launch_mma_row<Scales::kPerRowScales, kE4M3>(row, p, out, device, stream);
  if (element == kE4M3 && columns) return launch_mma_row<Scales::kColumns, kE4M3>(row, p, out, device, stream);
  if (element == kE4M3) return launch_mma_row<Scales::kBlocks, kE4M3>(row, p, out, device, stream);
#endif
  refuse();
}

}  // namespace

void launch(Choice const& choice, gemm::GroupwiseProblem problem, DType element, DType out, int device, Stream stream,
            epilogue::Operands const& operands) {
  DeviceGuard const guard(device);
  problem.split_k = choice.split_k;
  switch (choice.family) {
    case Family::kMma:
      return launch_mma(choice.row, problem, element, out, device, stream);
#if EPILOQ_HAS_SM90
    case Family::kSm90:
      return sm90_launch<Scales::kBlocks>(choice.row, out)(problem, device, stream);
    case Family::kSm90ColumnScales:
      return sm90_launch<Scales::kColumns>(choice.row, out)(problem, device, stream);
    case Family::kSm90Transposed:
      return sm90_launch<Scales::kColumnsOfWholeRows>(choice.row, out)(problem, device, stream);
    case Family::kSm90Int8Rows: {
      constexpr auto kRows = std::make_index_sequence<kInt8RowTiles.size()>{};
      return epilogue::with_epilogue(epilogue::Int8Epilogues{}, operands, [&]<class Epilogue>() {
        rows_launch<DType::kInt8, Epilogue>(choice.row, out, kRows)(problem, device, stream);
      });
    }
    case Family::kSm90Float8Rows: {
      constexpr auto kRows = std::make_index_sequence<kFloat8RowTiles.size()>{};
      return epilogue::with_epilogue(epilogue::Float8Epilogues{}, operands, [&]<class Epilogue>() {
        rows_launch<DType::kFloat8E4M3, Epilogue>(choice.row, out, kRows)(problem, device, stream);
      });
    }
#endif
    case Family::kGeneric:
      return launch_generic(problem, element, out, device, stream);
    default:
      refuse();
  }
}
#else
void launch(Choice const&, gemm::GroupwiseProblem, DType, DType, int device, Stream, epilogue::Operands const&) {
  device_properties(device);
}
#endif

}  // namespace epiloq::ops::groupwise_mm
