// Stable counting sort of rows by expert, in one CTA. A warp has consecutive rows and counts them by expert; the counts
// of all warps become the places where each warp's rows of an expert begin.

#include <algorithm>
#include <cub/block/block_scan.cuh>
#include <utility>

#include "core/ceil_div.h"
#include "core/cuda_check.h"
#include "epiloq/device.h"
#include "kernels/common/device_code.cuh"
#include "kernels/experts/expert_of.cuh"
#include "problems/experts/expert_routing.h"

namespace epiloq::ops::expert_routing {
namespace {

// Bins are the experts, and one for rows without an expert here.
constexpr int kMostBins = kMostExperts + 1;
// Counters of all warps. If there are many experts, fewer warps sort.
constexpr int kCounters = 33 * 512;
static_assert(kMostBins <= kCounters && kMostSortedRows < 1 << 16);

// `rows_of_warp` is a multiple of 32; `warps` of them have rows. A thread adds up kBins bins.
template <int kThreads, int kBins>
__global__ __launch_bounds__(kThreads) void sort_kernel(__grid_constant__ SortProblem const p, int rows_of_warp,
                                                        int warps) {
  using Scan = cub::BlockScan<int, kThreads>;
  __shared__ typename Scan::TempStorage scan;
  __shared__ std::uint16_t counters[kCounters];
  pdl_wait();
  pdl_trigger();
  int const bins = p.experts + 1, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i < warps * bins; i += kThreads) counters[i] = 0;
  __syncthreads();

  // Calls `act` for 32 of the warp's rows at a time, with a lane's row, its bin (-1 past the last row) and the lanes
  // with the same one. The next rows' experts are loaded meanwhile.
  std::uint16_t* const own = counters + warp * bins;
  auto const for_rows = [&](auto const& act) {
    int const end = min((warp + 1) * rows_of_warp, p.rows);
    auto const bin_of = [&](int row) { return row < end ? expert_of(p, row) : -1; };
    int bin = bin_of(warp * rows_of_warp + lane);
    for (int row = warp * rows_of_warp + lane; row - lane < end; row += 32) {
      int const next = bin_of(row + 32);
      unsigned const same = __match_any_sync(~0u, bin);
      act(row, bin, same);
      __syncwarp();  // counters
      bin = next;
    }
  };
  auto const add = [&](int bin, unsigned same) {
    if (bin >= 0 && __ffs(static_cast<int>(same)) == lane + 1) own[bin] += __popc(same);
  };

  for_rows([&](int, int bin, unsigned same) { add(bin, same); });
  __syncthreads();
  int counts[kBins] = {}, begins[kBins];
  auto const for_bins = [&](auto const& act) {
#pragma unroll
    for (int i = 0; i < kBins; ++i) {
      int const bin = threadIdx.x * kBins + i;
      if (bin < bins) act(i, bin);
    }
  };
  for_bins([&](int i, int bin) {
    for (int w = 0; w < warps; ++w) {
      int const of_warp = counters[w * bins + bin];
      counters[w * bins + bin] = static_cast<std::uint16_t>(counts[i]);
      counts[i] += of_warp;
    }
  });
  Scan(scan).ExclusiveSum(counts, begins);
  for_bins([&](int i, int bin) {
    for (int w = 0; w < warps; ++w) counters[w * bins + bin] += static_cast<std::uint16_t>(begins[i]);
    if (bin < p.experts) p.ends[bin] = begins[i] + counts[i];
  });
  __syncthreads();
  for_rows([&](int row, int bin, unsigned same) {
    int const place = bin < 0 ? 0 : own[bin] + __popc(same & ((1u << lane) - 1));
    __syncwarp();
    add(bin, same);
    if (bin < 0) return;
    if (p.order != nullptr) p.order[place] = row;
    p.tokens[place] = row / p.top_k, p.places[row] = place;
  });
}

}  // namespace

void launch_sort(SortProblem const& p, int device, Stream stream) {
  DeviceGuard const guard(device);
  auto const launch = [&]<int kThreads, int kBins>(std::integer_sequence<int, kThreads, kBins>) {
    auto const parts_of = [](int count, int size) { return static_cast<int>(ceil_div(count, size)); };
    int const most_warps = std::min(kThreads / 32, kCounters / (p.experts + 1));
    int const rows_of_warp = std::max(1, parts_of(parts_of(p.rows, most_warps), 32)) * 32;
    cuda_check(launch_pdl(&sort_kernel<kThreads, kBins>, dim3(1), kThreads, 0, stream, p, rows_of_warp,
                          parts_of(p.rows, rows_of_warp)),
               "launching epiloq.sort_expert_rows");
  };
  // Few threads start and synchronise sooner.
  constexpr int kFew = 256, kMany = 1024;
  if (p.rows <= kFew && p.experts < kFew) return launch(std::integer_sequence<int, kFew, 1>{});
  launch(std::integer_sequence<int, kMany, (kMostBins + kMany - 1) / kMany>{});
}

}  // namespace epiloq::ops::expert_routing
