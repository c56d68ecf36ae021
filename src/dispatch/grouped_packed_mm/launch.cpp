#include "dispatch/grouped_packed_mm/launch.h"

#include <utility>

#include "epiloq/device.h"
#include "epiloq/error.h"

#if EPILOQ_HAS_CUDA
#include "core/cuda_check.h"
#endif

namespace epiloq::ops::grouped_packed_mm {

#if EPILOQ_HAS_CUDA
namespace {

constexpr bool has_type(DType x) { return x == DType::kFloat16 || EPILOQ_HAS_SM80 || EPILOQ_HAS_SM90; }
// MXFP4's WGMMA kernels fold scales into weights, which takes bfloat16's exponents.
constexpr bool has_exponents(DType x, Format format) { return format != Format::kMxfp4 || x == DType::kBFloat16; }

// The kernels of each family by row of its table, type of x and format: `of` returns null for what is not compiled.
struct Tiles {
  template <int kRow, DType kX, Format kOf>
  static constexpr Launch of() {
    if constexpr (has_type(kX)) return &launch_grouped<kRow, kX, kOf>;
    return nullptr;
  }
};
struct Gemv {
  template <int kRow, DType kX, Format kOf>
  static constexpr Launch of() {
    if constexpr (has_type(kX) && is_fp4(kOf)) return &launch_gemv<kRow, kX, kOf>;
    return nullptr;
  }
};
struct Wgmma {
  template <int kRow, DType kX, Format kOf>
  static constexpr Launch of() {
    if constexpr (EPILOQ_HAS_SM90 && is_fp4(kOf) && has_exponents(kX, kOf)) return &launch_wgmma<kRow, kX, kOf>;
    return nullptr;
  }
};
struct Experts {
  template <int kRow, DType kX, Format kOf>
  static constexpr Launch of() {
    if constexpr (EPILOQ_HAS_SM90 && has_exponents(kX, kOf)) return &launch_expert_wgmma<kRow, kX, kOf>;
    return nullptr;
  }
};
struct ExpertDecode {
  template <int kRow, DType kX, Format kOf>
  static constexpr Launch of() {
    if constexpr (EPILOQ_HAS_SM90) return &launch_expert_decode<kRow, kX, kOf>;
    return nullptr;
  }
};

struct ExpertGemv {
  template <int kRow, DType kX, Format kOf>
  static constexpr Launch of() {
    if constexpr (EPILOQ_HAS_SM90) return &launch_expert_gemv<kRow, kX, kOf>;
    return nullptr;
  }
};

using ByFormat = std::array<Launch, kFormats>;
using ByType = std::array<ByFormat, 2>;

template <class Kernels, int kRow, DType kX, int... kFormat>
constexpr ByFormat by_format(std::integer_sequence<int, kFormat...>) {
  return {Kernels::template of<kRow, kX, static_cast<Format>(kFormat)>()...};
}
template <class Kernels, int... kRow>
constexpr std::array<ByType, sizeof...(kRow)> by_row(std::integer_sequence<int, kRow...>) {
  constexpr std::make_integer_sequence<int, kFormats> kEach;
  return {
      ByType{by_format<Kernels, kRow, DType::kFloat16>(kEach), by_format<Kernels, kRow, DType::kBFloat16>(kEach)}...};
}
template <class Kernels, std::size_t kCount>
constexpr auto kTable = by_row<Kernels>(std::make_integer_sequence<int, static_cast<int>(kCount)>{});

ByType const& row_of(Choice const& choice) {
  switch (choice.family) {
    case Family::kGemv:
      return kTable<Gemv, kGemvRows.size()>[choice.row];
    case Family::kWgmma:
      return kTable<Wgmma, kWgmmaRows.size()>[choice.row];
    case Family::kExperts:
      return kTable<Experts, kExpertRows.size()>[choice.row];
    case Family::kExpertDecode:
      return kTable<ExpertDecode, kExpertDecodeRows.size()>[choice.row];
    case Family::kExpertGemv:
      return kTable<ExpertGemv, kExpertGemvRows.size()>[choice.row];
    default:
      return kTable<Tiles, kRows.size()>[choice.row];
  }
}

}  // namespace

void launch(Choice const& choice, Problem const& problem, DType x, int device, Stream stream) {
  DeviceGuard const guard(device);
  Launch const launch = row_of(choice)[x == DType::kBFloat16][static_cast<int>(choice.format)];
  if (launch == nullptr) throw Unsupported("epiloq.grouped_packed_mm: this build lacks the kernel; see EPILOQ_ARCHS");
  launch(problem, choice.tiles, choice.split, device, stream);
}
#else
void launch(Choice const&, Problem const&, DType, int device, Stream) { device_properties(device); }
#endif

}  // namespace epiloq::ops::grouped_packed_mm
