#include "dispatch/weight_only_mm/launch.h"

#include "epiloq/error.h"

#if EPILOQ_HAS_CUDA
#include "core/cuda_check.h"
#include "dispatch/w4a16_variants.h"
#include "dispatch/weight_only_mm/tables.h"
#include "kernels/launch/weight_only_mm.h"
#endif

namespace epiloq::ops::weight_only_mm {

#if EPILOQ_HAS_CUDA
namespace {

// SM75 has the last row of each table, in float16.
template <bool kIsLast, DType kX>
constexpr bool kBuilt = EPILOQ_HAS_SM80 || EPILOQ_HAS_SM90 || (kIsLast && kX == DType::kFloat16);

struct GemvFamily {
  using Launch = weight_only_mm::Launch;
  static constexpr int kRows = static_cast<int>(kGemvRows.size());
  static constexpr bool is_narrow(int row) { return is_narrow_gemv(row); }
  template <int kRow, DType kX, int kBits, int kGroups, bool kOffsets>
  static constexpr Launch launch() {
    if constexpr (kBuilt<kRow + 1 == kRows, kX>) return &launch_gemv<kRow, kX, kBits, kGroups, kOffsets>;
    return nullptr;
  }
};
struct TiledFamily {
  using Launch = weight_only_mm::Launch;
  static constexpr int kRows = static_cast<int>(kTiledRows.size());
  static constexpr bool is_narrow(int row) { return is_narrow_tiled(row); }
  template <int kRow, DType kX, int kBits, int kGroups, bool kOffsets>
  static constexpr Launch launch() {
    if constexpr (kBuilt<kRow + 1 == kRows, kX>) return &launch_tiled<kRow, kX, kBits, kGroups, kOffsets>;
    return nullptr;
  }
};
struct DecodeFamily {
  using Launch = weight_only_mm::Launch;
  static constexpr int kRows = static_cast<int>(kDecodeRows.size());
  template <int kRow, DType kX, int kBits, int kGroups, bool kOffsets>
  static constexpr Launch launch() {
    if constexpr (EPILOQ_HAS_SM90 && !kOffsets) return &launch_decode<kRow, kX, kBits, kGroups>;
    return nullptr;
  }
};
struct WgmmaFamily {
  using Launch = weight_only_mm::Launch;
  static constexpr int kRows = static_cast<int>(kWgmmaRows.size());
  template <int kRow, DType kX, int kBits, int kGroups, bool kOffsets>
  static constexpr Launch launch() {
    if constexpr (EPILOQ_HAS_SM90 && !kOffsets) return &launch_wgmma<kRow, kX, kBits, kGroups>;
    return nullptr;
  }
};

Launch kernel_of(Choice const& choice, DType x, Weight const& weight) {
  switch (choice.family) {
    case Family::kGemv:
      return variant_of<GemvFamily>(choice.row, x, weight);
    case Family::kTiled:
      return variant_of<TiledFamily>(choice.row, x, weight);
    case Family::kDecode:
      return variant_of<DecodeFamily>(choice.row, x, weight);
    default:
      return variant_of<WgmmaFamily>(choice.row, x, weight);
  }
}

}  // namespace

void launch(Choice const& choice, Problem const& problem, DType x, int device, Stream stream) {
  DeviceGuard const guard(device);
  Launch const launch = kernel_of(choice, x, problem.weight);
  if (launch == nullptr) throw Unsupported("epiloq.weight_only_mm: this build lacks the kernel; see EPILOQ_ARCHS");
  launch(problem, choice.split, device, stream);
}
#else
void launch(Choice const&, Problem const&, DType, int device, Stream) { device_properties(device); }
#endif

}  // namespace epiloq::ops::weight_only_mm
