#pragma once

// Launches of small kernels after kernels that fill a GPU.

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/cuda_check.h"
#include "epiloq/device.h"
#include "kernels/common/device_code.cuh"
#include "kernels/common/occupancy.h"

namespace epiloq {

// Dynamic shared memory per CTA that spreads the CTAs evenly over the SMs. A kernel that starts before its predecessor
// has finished (PDL) would otherwise pile up on the first SMs that become free.
constexpr int spread_smem_bytes(std::int64_t blocks, int threads, DeviceProperties const& device) {
  constexpr int kFirstArch = 90;  // first with PDL
  constexpr int kMostBlocks = 8;  // per SM, and threads: beyond that CTAs spread by themselves
  constexpr int kMostThreads = 1024;
  std::int64_t const share = std::max<std::int64_t>(1, (blocks + device.sm_count - 1) / device.sm_count);
  if (device.compute_capability < kFirstArch || share > kMostBlocks || share * threads > kMostThreads) return 0;
  return smem_for_ctas_per_sm(share, device.shared_memory_per_block);
}

// The even share of CTAs fits, with a little shared memory of their own, and one more does not.
constexpr bool spreads(int shared_memory_per_block) {
  DeviceProperties const device{90, 100, shared_memory_per_block, 0};
  constexpr int kOwn = 256;
  for (int share = 1; share <= 8; ++share) {
    int const each = spread_smem_bytes(share * 100, 32, device) + kReservedPerCta;
    int const all = shared_memory_per_block + kReservedPerCta;
    if (share * (each + kOwn) > all || (share + 1) * each <= all) return false;
  }
  return true;
}
static_assert(spreads(227 * 1024) && spreads(99 * 1024));

// On the current device.
template <class... Parameters, class... Arguments>
void launch_spread(char const* doing, void (*kernel)(Parameters...), dim3 grid, dim3 block, cudaStream_t stream,
                   Arguments&&... arguments) {
  int device = 0;
  cuda_check(cudaGetDevice(&device), doing);
  DeviceProperties const& properties = device_properties(device);
  int const threads = static_cast<int>(block.x * block.y);
  int const bytes = spread_smem_bytes(std::int64_t{grid.x} * grid.y, threads, properties);
  // Kernels whose limit this thread has raised; raising it twice is harmless.
  thread_local std::vector<std::pair<void const*, int>> prepared;
  std::pair const key{reinterpret_cast<void const*>(kernel), device};
  if (bytes > 0 && std::ranges::find(prepared, key) == prepared.end()) {
    int const most = spread_smem_bytes(1, 1, properties);
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most), doing);
    prepared.push_back(key);
  }
  cuda_check(launch_pdl(kernel, grid, block, bytes, stream, std::forward<Arguments>(arguments)...), doing);
}

}  // namespace epiloq
