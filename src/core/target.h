#pragma once

#include <array>
#include <cstdint>

#include "epiloq/device.h"

namespace epiloq {

// What the choice of a kernel depends on of a device.
struct Target {
  Arch arch;
  int sm_count;
  int shared_bytes;        // that a block may have
  bool has_wgmma = false;  // SM90 itself: what came after runs other kernels of kSm90, but lacks the instruction
  int memory_gb_s = 0;     // by its clock and width
};

// Clusters of 1 to 8 blocks that the SMs of an H200 hold, with one block an SM and with two
// (cudaOccupancyMaxActiveClusters): its groups of SMs are not all of one size, and what is left over stays idle.
inline constexpr int kMaxCluster = 8, kSmsOfClusters = 132;
inline constexpr std::array<std::array<std::int64_t, kMaxCluster>, 2> kClusters{
    {{132, 66, 39, 30, 22, 17, 15, 15}, {264, 132, 79, 62, 47, 39, 32, 30}}};

}  // namespace epiloq
