#include "dispatch/conv2d_weight_only/launch.h"

#include "dispatch/conv2d_weight_only/select.h"
#include "epiloq/device.h"
#include "epiloq/error.h"

#if EPILOQ_HAS_CUDA
#include "core/cuda_check.h"
#include "dispatch/conv2d_weight_only/tables.h"
#include "dispatch/w4a16_variants.h"
#include "kernels/launch/conv2d_weight_only.h"
#include "problems/packed_layout.h"
#endif

namespace epiloq::ops::conv2d_weight_only {

#if EPILOQ_HAS_CUDA
namespace {

struct PatchesFamily {
  using Launch = conv2d_weight_only::Launch;
  static constexpr int kRows = static_cast<int>(conv2d_weight_only::kRows.size());
  // As in CMakeLists.txt.
  template <int kRow, DType kX>
  static constexpr bool kBuilt =
      kRow == kSm75Row ? EPILOQ_HAS_SM75 && kX == DType::kFloat16 : EPILOQ_HAS_SM80 || EPILOQ_HAS_SM90;
  template <int kRow, DType kX, int kBits, int kGroups, bool kOffsets>
  static constexpr Launch launch() {
    if constexpr (kBuilt<kRow, kX>) return &launch_patches<kRow, kX, kBits, kGroups, kOffsets>;
    return nullptr;
  }
};

struct WgmmaFamily {
  using Launch = conv2d_weight_only::Launch;
  static constexpr int kRows = static_cast<int>(kWgmmaRows.size());
  template <int kRow, DType kX, int kBits, int kGroups, bool kOffsets>
  static constexpr Launch launch() {
    if constexpr (EPILOQ_HAS_SM90 && !kOffsets) return &launch_wgmma<kRow, kX, kBits, kGroups>;
    return nullptr;
  }
};

void launch_row(Choice const& choice, Problem const& p, int device, Stream stream) {
  conv2d::Shape const& s = p.shape;
  weight_only_mm::Problem const product{.weight = p.weight,
                                        .m = static_cast<int>(conv2d::pixels(s)),
                                        .stride_x = 0,
                                        .stride_out = s.out_pixel,
                                        .x = p.x,
                                        .out = p.out,
                                        .bias = p.bias,
                                        .lo = p.lo,
                                        .hi = p.hi};
  auto const step = conv2d::Column::of(s, p.padded_channels, weight_only_mm::kPadding);
  Launch const launch = choice.family == Family::kWgmma
                            ? weight_only_mm::variant_of<WgmmaFamily>(choice.row, p.dtype, p.weight)
                            : weight_only_mm::variant_of<PatchesFamily>(choice.row, p.dtype, p.weight);
  if (launch == nullptr) throw Unsupported("epiloq.conv2d_weight_only: this build lacks the kernel; see EPILOQ_ARCHS");
  launch({product, s, p.channels, p.padded_channels, step, 0}, choice.split, device, stream);
}

}  // namespace

void launch(Choice const& choice, Problem const& problem, int device, Stream stream) {
  DeviceGuard const guard(device);
  if (choice.family == Family::kDepthwise) {
    launch_depthwise(problem, stream);
  } else {
    launch_row(choice, problem, device, stream);
  }
}
#else
void launch(Choice const&, Problem const&, int device, Stream) { device_properties(device); }
#endif

}  // namespace epiloq::ops::conv2d_weight_only
