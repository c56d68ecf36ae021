#pragma once

// The launches of grouped_packed_mm's GEMV for experts (SM90): declared for dispatch/grouped_packed_mm, defined in
// sm80/w4a16/expert_gemv.cuh, and instantiated a format at a time in sources that CMake expands from kernels.cu.in.

#include "kernels/launch/grouped_packed_mm.h"

namespace epiloq::ops::grouped_packed_mm {

// CTAs of `warps` warps, which alternate K steps of kExpertGemvPanels panels of 16 weight rows; `blocks` of them on an
// SM. On an H200 neither twice as many panels nor split-K was faster, where the GEMV is chosen.
inline constexpr int kExpertGemvPanels = 2, kExpertGemvStages = 3;
inline constexpr int kExpertGemvTileRows = kExpertGemvPanels * weight_only_mm::kPanelRows;
struct ExpertGemvConfig {
  int warps, blocks;
};
inline constexpr std::array kExpertGemvRows{ExpertGemvConfig{8, 2}, ExpertGemvConfig{4, 4}};

template <int kRow, DType kX, Format kFormat>
void launch_expert_gemv(Problem const&, int tiles, int split, int device, Stream);

}  // namespace epiloq::ops::grouped_packed_mm
