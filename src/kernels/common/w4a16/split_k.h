#pragma once

// Where partial sums from other CTAs lie in the owner of a subtile: in consecutive slots, the next rank's first.

#include "kernels/common/split_k.h"
#include "kernels/common/w4a16/config.h"

namespace epiloq::ops::weight_only_mm {

using gemm::Subtile;
using gemm::SubtileOwnership;

// The slot for the CTA `distance` ranks after the owner, from 1 on.
EPILOQ_HD constexpr int receive_slot(Subtile const& subtile, int distance, int split) {
  return subtile.ordinal * (split - 1) + distance - 1;
}
// Slots per CTA for partial sums from others.
EPILOQ_HD constexpr int receive_slots(int subtiles, int split) { return (subtiles + split - 1) / split * (split - 1); }

// Order of a WGMMA tile's subtiles: [panel][K group][8-token group of the K group]. A warp's subtiles are
// consecutive, so that every warp owns some whatever the split.
EPILOQ_HD constexpr int first_subtile(int panel, int k_group, int token_groups, int k_groups) {
  int const longer = token_groups % k_groups;
  return panel * token_groups + k_group * (token_groups / k_groups) + (k_group < longer ? k_group : longer);
}

// Subtiles of the GEMV kernel. With split-K a CTA's shared memory begins with a barrier and the receive slots.
inline constexpr int kSubtileElements = 128, kReceivedBarrierBytes = kSharedLine;
EPILOQ_HD constexpr int gemv_subtiles(int tokens, int rows) {
  return (tokens * rows + kSubtileElements - 1) / kSubtileElements;
}
EPILOQ_HD constexpr int gemv_received_bytes(int tokens, int rows, int split) {
  return split > 1 ? kReceivedBarrierBytes + receive_slots(gemv_subtiles(tokens, rows), split) * kSubtileElements * 4
                   : 0;
}

}  // namespace epiloq::ops::weight_only_mm
