#pragma once

// Stage layout of the mma.sync weight-only kernels, shared with dispatch.

#include "kernels/common/w4a16/config.h"
#include "problems/packed_layout.h"
#include "problems/weight_only.h"

namespace epiloq::ops::weight_only_mm {

// A K step of a warp's rows in shared memory: integers as they lie in the weight, [panel][vector][lane], then for each
// panel its scales [group][16], and its offsets or zero points [group][16]. All multiples of 16 bytes, the whole of
// 128.
struct StageLayout {
  int scale_bytes;      // per value
  int scales;           // per panel
  int parameter_bytes;  // per panel
  int bytes;

  // `other_bytes`: of an offset or a zero point.
  static constexpr StageLayout of(int bits, int scale_bytes, int other_bytes, int panels, int groups) {
    int const values = groups * kPanelRows, parameter_bytes = values * (scale_bytes + other_bytes);
    return {scale_bytes, values * scale_bytes, parameter_bytes,
            whole_lines(panels * (kPanelRows * kPadding * bits / 8 + parameter_bytes))};
  }
  static StageLayout of(Weight const& w, int panels, int groups) {
    int const scale_bytes = static_cast<int>(size_of(w.scale_dtype));
    return of(w.bits, scale_bytes, w.offset != nullptr ? scale_bytes : w.zero != nullptr, panels, groups);
  }
};

}  // namespace epiloq::ops::weight_only_mm
