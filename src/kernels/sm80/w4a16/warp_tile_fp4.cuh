#pragma once

// Warp tile of the GEMV kernel with FP4 weights: loads K steps of its weight rows, and multiplies them by tokens.

#include "core/ceil_div.h"
#include "kernels/common/w4a16/fp4_step.cuh"
#include "kernels/sm80/w4a16/warp_tile.cuh"

namespace epiloq::ops::weight_only_mm {

// See in_register.
template <class T>
__device__ __forceinline__ T const* pointer_in_register(T const* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

// The step's panels in global and shared memory.
template <class T, int kGroups, int kPanels, int kTiles>
struct Fp4Warp : Fp4Step<T, kGroups, kPanels, kTiles> {
  using Base = Fp4Step<T, kGroups, kPanels, kTiles>;
  using Base::kPanelBytes, Base::kScaleBytes, Base::kWeightBytes, Base::lane;
  using typename Base::F;
  using typename Base::Step;
  using typename Base::Sums;

  // A lane's sources: its 16 bytes of a panel's two vectors, and 16 bytes of one panel's scales, or of two panels'.
  // Rows past the last panel are read as the last panel's, and their sums dropped. Offsets fit 32 bits (checked in
  // select.cpp).
  struct Source {
    static constexpr int kScaleLanes = kScaleBytes / 16;  // per panel
    static constexpr int kPanelsAtOnce = kLanes / kScaleLanes, kScaleVectors = ceil_div(kPanels, kPanelsAtOnce);
    std::uint8_t const *q, *scales[kScaleVectors];
    Word q_at[kPanels];
    SharedAddress lane_at;

    __device__ __forceinline__ Source(Weight const& w, StageLayout const&, int first_panel)
        : q(pointer_in_register(w.q + lane() * 16)), lane_at(in_register(lane() * 16)) {
      int const last = (w.n - 1) / kPanelRows;
#pragma unroll
      for (int s = 0; s < kPanels; ++s) {
        q_at[s] = static_cast<Word>(min(first_panel + s, last)) * (w.padded_k / kStep * kPanelBytes);
      }
      auto const* const all = static_cast<std::uint8_t const*>(w.scale);
#pragma unroll
      for (int v = 0; v < kScaleVectors; ++v) {
        Word const panel = min(first_panel + v * kPanelsAtOnce + lane() / kScaleLanes, last);
        scales[v] = pointer_in_register(all + panel * (w.groups * kPanelRows) + lane() % kScaleLanes * 16);
      }
    }

    __device__ __forceinline__ void issue(StageLayout const&, SharedAddress stage, int step) const {
      SharedAddress const to = stage + lane_at;
      std::uint8_t const* const from = q + step * kPanelBytes;
#pragma unroll
      for (int s = 0; s < kPanels; ++s) {
        cp_async16(to + s * kPanelBytes, from + q_at[s]);
        cp_async16(to + s * kPanelBytes + kPanelBytes / 2, from + q_at[s] + kPanelBytes / 2);
      }
#pragma unroll
      for (int v = 0; v < kScaleVectors; ++v) {
        bool const is_whole = (v + 1) * kPanelsAtOnce <= kPanels;
        if (is_whole || lane() < (kPanels - v * kPanelsAtOnce) * kScaleLanes) {
          cp_async16(to + kWeightBytes + v * kLanes * 16, scales[v] + step * kScaleBytes);
        }
      }
    }
  };

  static __device__ __forceinline__ Step step_of(std::uint8_t const* stage) { return {stage, stage + kWeightBytes}; }

  // To shared memory, [token][row], tokens `stride` apart; `unit` multiplies all sums.
  static __device__ __forceinline__ void store(float* target, int stride, Sums const& sums, float unit) {
    Warp<T, 4, kGroups, false, kPanels, kTiles, F>::store(target, stride, sums, unit);
  }
};

}  // namespace epiloq::ops::weight_only_mm
