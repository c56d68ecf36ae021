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

template <int kRow, DType kX, int... kFormat>
constexpr std::array<Launch, kFormats> by_format(std::integer_sequence<int, kFormat...>) {
  if constexpr (kX == DType::kFloat16 || EPILOQ_HAS_SM80 || EPILOQ_HAS_SM90) {
    return {&launch_grouped<kRow, kX, static_cast<Format>(kFormat)>...};
  }
  return {};
}

// GEMVs are compiled for FP4 alone.
template <int kRow, DType kX>
constexpr std::array<Launch, kFormats> gemv_by_format() {
  std::array<Launch, kFormats> all{};
  if constexpr (kX == DType::kFloat16 || EPILOQ_HAS_SM80 || EPILOQ_HAS_SM90) {
    all[static_cast<int>(Format::kMxfp4)] = &launch_gemv<kRow, kX, Format::kMxfp4>;
    all[static_cast<int>(Format::kNvfp4)] = &launch_gemv<kRow, kX, Format::kNvfp4>;
  }
  return all;
}

using ByType = std::array<std::array<Launch, kFormats>, 2>;

template <int... kRow>
constexpr std::array<ByType, sizeof...(kRow)> table(std::integer_sequence<int, kRow...>) {
  constexpr std::make_integer_sequence<int, kFormats> kEach;
  return {ByType{{by_format<kRow, DType::kFloat16>(kEach), by_format<kRow, DType::kBFloat16>(kEach)}}...};
}
constexpr auto kTable = table(std::make_integer_sequence<int, static_cast<int>(kRows.size())>{});

template <int... kRow>
constexpr std::array<ByType, sizeof...(kRow)> gemv_table(std::integer_sequence<int, kRow...>) {
  return {ByType{{gemv_by_format<kRow, DType::kFloat16>(), gemv_by_format<kRow, DType::kBFloat16>()}}...};
}
constexpr auto kGemvTable = gemv_table(std::make_integer_sequence<int, static_cast<int>(kGemvRows.size())>{});

// WGMMA for one matrix is compiled for FP4 alone, and MXFP4 for bfloat16 alone, which has its exponents.
#if EPILOQ_HAS_SM90
template <int kRow>
constexpr ByType wgmma_by_type() {
  ByType all{};
  all[0][static_cast<int>(Format::kNvfp4)] = &launch_wgmma<kRow, DType::kFloat16, Format::kNvfp4>;
  all[1][static_cast<int>(Format::kNvfp4)] = &launch_wgmma<kRow, DType::kBFloat16, Format::kNvfp4>;
  all[1][static_cast<int>(Format::kMxfp4)] = &launch_wgmma<kRow, DType::kBFloat16, Format::kMxfp4>;
  return all;
}
template <int... kRow>
constexpr std::array<ByType, sizeof...(kRow)> wgmma_table(std::integer_sequence<int, kRow...>) {
  return {wgmma_by_type<kRow>()...};
}
constexpr auto kWgmmaTable = wgmma_table(std::make_integer_sequence<int, static_cast<int>(kWgmmaRows.size())>{});
// For experts it is compiled for all formats but MXFP4 in float16.
template <int kRow, DType kX, int... kFormat>
constexpr std::array<Launch, kFormats> experts_by_format(std::integer_sequence<int, kFormat...>) {
  return {[]() -> Launch {
    constexpr Format kOf = static_cast<Format>(kFormat);
    if constexpr (kOf == Format::kMxfp4 && kX == DType::kFloat16) {
      return nullptr;
    } else {
      return &launch_expert_wgmma<kRow, kX, kOf>;
    }
  }()...};
}
template <int... kRow>
constexpr std::array<ByType, sizeof...(kRow)> expert_table(std::integer_sequence<int, kRow...>) {
  constexpr std::make_integer_sequence<int, kFormats> kEach;
  return {
      ByType{{experts_by_format<kRow, DType::kFloat16>(kEach), experts_by_format<kRow, DType::kBFloat16>(kEach)}}...};
}
constexpr auto kExpertTable = expert_table(std::make_integer_sequence<int, static_cast<int>(kExpertRows.size())>{});
template <int kRow, DType kX, int... kFormat>
constexpr std::array<Launch, kFormats> decode_by_format(std::integer_sequence<int, kFormat...>) {
  return {&launch_expert_decode<kRow, kX, static_cast<Format>(kFormat)>...};
}
template <int... kRow>
constexpr std::array<ByType, sizeof...(kRow)> decode_table(std::integer_sequence<int, kRow...>) {
  constexpr std::make_integer_sequence<int, kFormats> kEach;
  return {ByType{{decode_by_format<kRow, DType::kFloat16>(kEach), decode_by_format<kRow, DType::kBFloat16>(kEach)}}...};
}
constexpr auto kExpertDecodeTable =
    decode_table(std::make_integer_sequence<int, static_cast<int>(kExpertDecodeRows.size())>{});
#else
constexpr std::array<ByType, kWgmmaRows.size()> kWgmmaTable{};
constexpr std::array<ByType, kExpertRows.size()> kExpertTable{};
constexpr std::array<ByType, kExpertDecodeRows.size()> kExpertDecodeTable{};
#endif

ByType const& row_of(Choice const& choice) {
  switch (choice.family) {
    case Family::kGemv:
      return kGemvTable[choice.row];
    case Family::kWgmma:
      return kWgmmaTable[choice.row];
    case Family::kExperts:
      return kExpertTable[choice.row];
    case Family::kExpertDecode:
      return kExpertDecodeTable[choice.row];
    default:
      return kTable[choice.row];
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
