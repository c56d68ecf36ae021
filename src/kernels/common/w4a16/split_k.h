#pragma once

// Where the sums of a piece that other blocks finish lie there: in slots that follow one another, those of the next
// block first.

#include "kernels/common/split_k.h"
#include "kernels/common/w4a16/config.h"

namespace epiloq::ops::weight_only_mm {

using gemm::Subtile;
using gemm::SubtileOwnership;

// Of the block that comes `distance` places after the piece's, from 1 on.
EPILOQ_HD constexpr int receive_slot(Subtile const& subtile, int distance, int split) {
  return subtile.ordinal * (split - 1) + distance - 1;
}
// In each block, for the sums of the others.
EPILOQ_HD constexpr int receive_slots(int subtiles, int split) { return (subtiles + split - 1) / split * (split - 1); }

// A wgmma tile's pieces, [panel][way along K][the way's eights of tokens]: a warp's follow one another. Numbered by
// panels first, those of one block would be a few warps' wherever two, four or eight blocks share K: 0.1 us later by
// two of them and 0.5 by four.
EPILOQ_HD constexpr int first_subtile(int panel, int k_group, int eights, int k_groups) {
  int const longer = eights % k_groups;
  return panel * eights + k_group * (eights / k_groups) + (k_group < longer ? k_group : longer);
}

// A stream's pieces are so many elements. Where its blocks share K, their shared memory begins with a barrier and
// slots.
inline constexpr int kSubtileElements = 128, kReceivedBarrierBytes = kSharedLine;
EPILOQ_HD constexpr int gemv_subtiles(int tokens, int rows) {
  return (tokens * rows + kSubtileElements - 1) / kSubtileElements;
}
EPILOQ_HD constexpr int gemv_received_bytes(int tokens, int rows, int split) {
  return split > 1 ? kReceivedBarrierBytes + receive_slots(gemv_subtiles(tokens, rows), split) * kSubtileElements * 4
                   : 0;
}

}  // namespace epiloq::ops::weight_only_mm
