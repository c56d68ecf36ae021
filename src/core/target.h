#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "epiloq/device.h"

namespace epiloq {

// The properties of a device that the choice of a kernel depends on.
struct Target {
  Arch arch;
  int sm_count;
  int shared_bytes;        // per CTA
  bool has_wgmma = false;  // SM90 itself; newer devices run other kernels of kSm90 but lack the instruction
  int memory_gb_s = 0;     // by clock and bus width

  bool has_clusters() const { return arch == Arch::kSm90; }
};

// Clusters of 1 to 8 CTAs that an H200 holds, with one CTA per SM and with two (cudaOccupancyMaxActiveClusters): its
// GPCs differ in size, and SMs left over idle.
inline constexpr int kMaxCluster = 8, kSmsOfClusters = 132;
inline constexpr std::array<std::array<std::int64_t, kMaxCluster>, 2> kClusters{
    {{132, 66, 39, 30, 22, 17, 15, 15}, {264, 132, 79, 62, 47, 39, 32, 30}}};

// Clusters of `split` CTAs that run at a time, each SM holding `resident` CTAs. If that is several, two CTAs of a
// cluster may share an SM, so that more clusters are resident.
inline std::int64_t clusters_at_once(int split, int resident, int sm_count) {
  int const measured = resident > 1 ? 2 : 1;  // CTAs per SM
  std::int64_t const of_h200 = kClusters[measured - 1][split - 1] * resident;
  return std::max<std::int64_t>(1, of_h200 * sm_count / (measured * kSmsOfClusters));
}
inline std::int64_t clusters_at_once(int split, int resident, Target const& t) {
  return clusters_at_once(split, resident, t.sm_count);
}

// CTAs of a cluster that may split K, at most: each has a K step.
inline int most_split(std::int64_t steps, Target const& t) {
  return static_cast<int>(std::min<std::int64_t>(steps, t.has_clusters() ? kMaxCluster : 1));
}

}  // namespace epiloq
