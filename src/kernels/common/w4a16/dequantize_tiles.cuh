#pragma once

// Shared by the kernels that dequantise a packed weight to rows in memory. A CTA has a panel of 16 rows and some of its
// tiles, a warp per tile at a time; a lane writes runs of neighbouring columns.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "epiloq/device.h"
#include "problems/packed_layout.h"
#include "problems/weight_only.h"

namespace epiloq::ops::weight_only_mm {

inline constexpr int kDequantizeThreads = 256, kDequantizeWarps = kDequantizeThreads / kLanes;

// 4 x 4 transposition among four lanes: word i of lane t becomes word t of lane i, after which a lane has neighbouring
// columns.
__device__ __forceinline__ void transpose_fours(std::uint32_t (&words)[4]) {
#pragma unroll
  for (int apart = 1; apart < 4; apart *= 2) {
    bool const upper = threadIdx.x & apart;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const low = apart == 1 ? 2 * i : i, high = low + apart;
      std::uint32_t const got = __shfl_xor_sync(~0u, upper ? words[low] : words[high], apart);
      (upper ? words[low] : words[high]) = got;
    }
  }
}

// Writes a run of W's row n from column k on, as vectors if rows are whole runs; nothing past K. `out` starts on 16
// bytes.
template <class T, int kRun>
__device__ __forceinline__ void store_run(Weight const& w, T* out, std::int64_t n, int k, T const (&values)[kRun]) {
  using Vector = std::conditional_t<sizeof(values) % sizeof(uint4) == 0, uint4, uint2>;
  T* const to = out + n * w.k + k;
  if (w.k % kRun == 0) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(values) / sizeof(Vector)); ++i) {
      reinterpret_cast<Vector*>(to)[i] = reinterpret_cast<Vector const*>(values)[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      if (k + i < w.k) to[i] = values[i];
    }
  }
}

// CTAs along x take panels, along y a panel's `tiles`. Warps loop over tiles if there are enough to fill all SMs.
inline dim3 dequantize_grid(std::int64_t rows, std::int64_t tiles, int device) {
  constexpr std::int64_t kCtasPerSm = 4, kMostTilesPerWarp = 4, kMostGridY = 65535;
  std::int64_t const panels = (rows + kPanelRows - 1) / kPanelRows;
  std::int64_t const enough = kDequantizeWarps * kCtasPerSm * device_properties(device).sm_count;
  std::int64_t const tiles_per_cta =
      kDequantizeWarps * std::clamp<std::int64_t>(panels * tiles / enough, 1, kMostTilesPerWarp);
  return dim3(static_cast<unsigned>(panels),
              static_cast<unsigned>(std::min(kMostGridY, (tiles + tiles_per_cta - 1) / tiles_per_cta)));
}

}  // namespace epiloq::ops::weight_only_mm
