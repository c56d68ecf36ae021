#include "dispatch/scaled_mm/launch.h"

#include <span>
#include <utility>

#include "epiloq/error.h"

#if EPILOQ_HAS_CUDA
#include "core/cuda_check.h"
#include "dispatch/groupwise_mm/launch.h"
#include "dispatch/scaled_mm/tables.h"
#include "kernels/launch/scaled_mm.h"
#endif

namespace epiloq::ops::scaled_mm {

#if EPILOQ_HAS_CUDA
namespace {

// A kernel of a table row, compiled for operand types and an epilogue.
struct Variant {
  Inputs inputs;
  bool writes_int8;
  bool (*applies)(epilogue::Operands const&);
  gemm::Launch launch;

  bool supports(gemm::Types types, epilogue::Operands const& operands) const {
    bool const is_half = types.out == DType::kFloat16 || types.out == DType::kBFloat16;
    return inputs == types.inputs() && (writes_int8 ? types.out == DType::kInt8 : is_half) && applies(operands);
  }
};

// The variants of a row, in the order of the epilogues.
template <template <int, Inputs, class> class Kernel, int kRow, class Epilogues, Inputs... kInputs>
struct Compiled;
template <template <int, Inputs, class> class Kernel, int kRow, class... Epilogues, Inputs... kInputs>
struct Compiled<Kernel, kRow, epilogue::List<Epilogues...>, kInputs...> {
  template <class Epilogue>
  static constexpr std::array kOfEpilogue{Variant{kInputs, std::is_same_v<typename Epilogue::Out, std::int8_t>,
                                                  &Epilogue::applies, &Kernel<kRow, kInputs, Epilogue>::launch}...};
  static constexpr auto kVariants = std::to_array<std::span<Variant const>>({kOfEpilogue<Epilogues>...});
};

constexpr auto kI8 = DType::kInt8, kE4M3 = DType::kFloat8E4M3, kE5M2 = DType::kFloat8E5M2;

// Operand types for which the rows of each table are compiled, as in CMakeLists.txt.
template <template <int, Inputs, class> class Kernel, int kRow>
struct Int8 : Compiled<Kernel, kRow, epilogue::Int8Epilogues, Inputs{kI8, kI8}> {};
template <template <int, Inputs, class> class Kernel, int kRow>
struct Int8Out : Compiled<Kernel, kRow, epilogue::Int8OutEpilogues, Inputs{kI8, kI8}> {};
template <template <int, Inputs, class> class Kernel, int kRow>
struct E4M3 : Compiled<Kernel, kRow, epilogue::Float8Epilogues, Inputs{kE4M3, kE4M3}> {};
template <template <int, Inputs, class> class Kernel, int kRow>
struct AnyFloat8 : Compiled<Kernel, kRow, epilogue::Float8Epilogues, Inputs{kE4M3, kE4M3}, Inputs{kE4M3, kE5M2},
                            Inputs{kE5M2, kE4M3}, Inputs{kE5M2, kE5M2}> {};
template <template <int, Inputs, class> class Kernel, int kRow>
struct Float8 : std::conditional_t<kRow == kE5M2Row, AnyFloat8<Kernel, kRow>, E4M3<Kernel, kRow>> {};

using Variants = std::span<std::span<Variant const> const>;  // by epilogue

template <template <template <int, Inputs, class> class, int> class List, template <int, Inputs, class> class Kernel,
          int kFirst = 0, std::size_t... kRows>
Variants row_of(int row, std::index_sequence<kRows...>) {
  static constexpr Variants kTable[] = {List<Kernel, kFirst + kRows>::kVariants...};
  return kTable[row - kFirst];
}

template <auto const& kTiles>
constexpr std::make_index_sequence<kTiles.size()> kRowsOf{};
constexpr std::make_index_sequence<1> kOneRow{};

Variants variants_of(Choice const& choice) {
  switch (choice.family) {
    case Family::kGenericInt8:
      return row_of<Int8Out, Generic>(0, kOneRow);
    case Family::kGeneric:
      return row_of<Int8, Generic>(choice.row, kOneRow);
#if EPILOQ_HAS_SM75
    case Family::kSm75:
      return row_of<Int8, Sm75>(choice.row, kRowsOf<kSm75Tiles>);
#endif
#if EPILOQ_HAS_SM80
    case Family::kSm80:
      return row_of<Int8, Sm80>(choice.row, kRowsOf<kSm80Tiles>);
    case Family::kSkinny:
      return row_of<Int8, Skinny>(choice.row, kRowsOf<kSkinnyTiles>);
#endif
#if EPILOQ_HAS_SM80 || EPILOQ_HAS_SM90
    case Family::kSm80Int8:
      return row_of<Int8Out, Sm80, kInt8OutFirst>(choice.row, std::make_index_sequence<kInt8OutRows>{});
#endif
#if EPILOQ_HAS_SM89
    case Family::kSm89:
      return row_of<Float8, Sm89>(choice.row, kRowsOf<kSm89Tiles>);
#endif
#if EPILOQ_HAS_SM90
    case Family::kSm90:
      return row_of<Int8, Sm90>(choice.row, kRowsOf<kSm90Tiles>);
    case Family::kSm90Float8:
      return row_of<Float8, Sm90Float8>(choice.row, kRowsOf<kSm90Float8Tiles>);
#endif
#if EPILOQ_HAS_SM89 || EPILOQ_HAS_SM90
    case Family::kGenericFloat8:
      return row_of<AnyFloat8, Generic>(choice.row, kOneRow);
#endif
    default:
      throw Unsupported("epiloq.scaled_mm: this build lacks the kernels asked for; see EPILOQ_ARCHS");
  }
}

gemm::GroupScales per_row_scales(float const* scales, bool is_vector) {
  return {.ptr = scales, .stride_row = is_vector ? 1 : 0};
}

// The groupwise GEMM with per-row scales.
void launch_per_row_scales(groupwise_mm::Choice const& choice, gemm::Types types, gemm::Problem const& p,
                           bool constant_b, int device, Stream stream) {
  epilogue::Operands const& with = p.operands;
  gemm::GroupwiseProblem const product{
      .m = p.m,
      .n = p.n,
      .k = p.k,
      .depth = p.k,
      .stride_a = p.stride_a,
      .stride_b = p.stride_b,
      .stride_d = p.stride_d,
      .a = p.a,
      .b = p.b,
      .d = p.d,
      .scale_a = per_row_scales(with.scale_a, with.scale_a_is_vector),
      .scale_b = per_row_scales(with.scale_b, with.scale_b_is_vector),
      .bias = with.bias,
      .azp_adj = with.azp_adj,
      .azp = with.azp,
      .azp_stride = with.azp_is_vector ? 1 : 0,
      .constant_b = constant_b,
  };
  groupwise_mm::launch(choice, product, types.a, types.out, device, stream, with);
}

}  // namespace

void launch(Choice const& choice, gemm::Types types, gemm::Problem problem, int device, Stream stream,
            bool constant_b) {
  if (choice.family == Family::kGroupwise) {
    return launch_per_row_scales(choice.groupwise, types, problem, constant_b, device, stream);
  }
  DeviceGuard const guard(device);
  problem.operands.is_bfloat16 = types.out == DType::kBFloat16;
  for (std::span<Variant const> const of_epilogue : variants_of(choice)) {
    for (Variant const& variant : of_epilogue) {
      if (variant.supports(types, problem.operands)) return variant.launch(problem, device, stream);
    }
  }
  throw Unsupported("epiloq.scaled_mm: no kernel for these operands");
}
#else
void launch(Choice const&, gemm::Types, gemm::Problem, int device, Stream, bool) { device_properties(device); }
#endif

}  // namespace epiloq::ops::scaled_mm
