#include "kernels/quantize/fp8_plan.h"

#include <bit>

namespace epiloq::ops::quantize_fp8 {
namespace {

constexpr int kVector = 8, kMaxLanes = 32, kBlockSide = 128;
constexpr int kLongestRow = 32768;  // that 1024 threads hold in registers, four vectors each

}  // namespace

bool in_vectors(Problem const& p, DType x) {
  auto const aligned = [](void const* pointer, std::uintptr_t bytes) {
    return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
  };
  return p.cols % kVector == 0 && p.padded_cols % kVector == 0 && p.stride_x * size_of(x) % 16 == 0 &&
         p.stride_q % kVector == 0 && aligned(p.x, 16) && aligned(p.q, 8);
}

Plan plan(Problem const& p, DType x) {
  if (!in_vectors(p, x)) return {Kernel::kElements, 0};
  switch (p.granularity) {
    case Granularity::kGroup: {
      bool const fits = p.tile_cols % kPerLane == 0 && std::has_single_bit(static_cast<unsigned>(p.tile_cols)) &&
                        p.tile_cols <= kMaxLanes * kPerLane;
      return fits ? Plan{Kernel::kTiles, p.tile_cols / kPerLane} : Plan{Kernel::kElements, 0};
    }
    case Granularity::kBlock:
      return {p.tile_cols == kBlockSide ? Kernel::kBlocks : Kernel::kElements, 0};
    default:
      if (p.is_static) return {Kernel::kTiles, kMaxLanes};
      if (p.cols > kLongestRow) return {Kernel::kElements, 0};
      if (p.cols > kMaxLanes * kPerLane) return {Kernel::kRows, 0};
      return {Kernel::kTiles, static_cast<int>(std::bit_ceil((p.cols + kPerLane - 1u) / kPerLane))};
  }
}

char const* describe(Kernel kernel) {
  constexpr char const* kNames[] = {
      "part of a warp per scale, one pass",
      "one CTA per row, one pass",
      "one CTA per scale, one pass",
      "element by element, two passes",
  };
  return kNames[static_cast<int>(kernel)];
}

}  // namespace epiloq::ops::quantize_fp8
