// Stable counting sort of a few rows by expert, in one CTA. A warp counts and places the rows of one expert at a time.

#include "core/cuda_check.h"
#include "epiloq/device.h"
#include "kernels/common/device_code.cuh"
#include "problems/experts/expert_routing.h"

namespace epiloq::ops::expert_routing {
namespace {

constexpr int kWarp = 32, kThreads = 512, kWarps = kThreads / kWarp;
constexpr unsigned kAll = ~0u;

struct Shared {
  int expert_of_row[kMostSortedRows];
  int count[kMostExperts + 1], first[kMostExperts + 1];  // of an expert's rows; E: of rows without an expert
};

// Calls act(row, rows of this expert so far among those before `row`) in each lane whose row is the expert's; returns
// their number.
template <class Act>
__device__ __forceinline__ int for_rows_of(int expert, Shared const& shared, int rows, int lane, Act act) {
  int before = 0;
  for (int begin = 0; begin < rows; begin += kWarp) {
    int const row = begin + lane;
    bool const is_own = row < rows && shared.expert_of_row[row] == expert;
    unsigned const own = __ballot_sync(kAll, is_own);
    if (is_own) act(row, before + __popc(own & ((1u << lane) - 1)));
    before += __popc(own);
  }
  return before;
}

__global__ __launch_bounds__(kThreads) void sort_kernel(__grid_constant__ SortProblem const p) {
  __shared__ Shared shared;
  pdl_wait();
  pdl_trigger();
  int const warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  for (int row = threadIdx.x; row < p.rows; row += kThreads) {
    std::int64_t const expert = p.expert_of_row[row];
    shared.expert_of_row[row] = expert >= 0 && expert < p.experts ? static_cast<int>(expert) : p.experts;
  }
  __syncthreads();
  for (int expert = warp; expert <= p.experts; expert += kWarps) {
    int const count = for_rows_of(expert, shared, p.rows, lane, [](int, int) {});
    if (lane == 0) shared.count[expert] = count;
  }
  __syncthreads();
  if (warp == 0) {
    int end = 0;
    for (int begin = 0; begin <= p.experts; begin += kWarp) {
      int const expert = begin + lane, count = expert <= p.experts ? shared.count[expert] : 0;
      int sum = count;
      for (int offset = 1; offset < kWarp; offset *= 2) {
        int const below = __shfl_up_sync(kAll, sum, offset);
        if (lane >= offset) sum += below;
      }
      if (expert <= p.experts) shared.first[expert] = end + sum - count;
      if (expert < p.experts) p.ends[expert] = end + sum;
      end += __shfl_sync(kAll, sum, kWarp - 1);
    }
  }
  __syncthreads();
  for (int expert = warp; expert <= p.experts; expert += kWarps) {
    if (shared.count[expert] == 0) continue;
    int const first = shared.first[expert];
    for_rows_of(expert, shared, p.rows, lane, [&](int row, int before) {
      int const place = first + before;
      p.order[place] = row, p.tokens[place] = row / p.top_k, p.places[row] = place;
    });
  }
}

}  // namespace

void launch_sort(SortProblem const& p, int device, Stream stream) {
  DeviceGuard const guard(device);
  cuda_check(launch_pdl(&sort_kernel, dim3(1), kThreads, 0, stream, p), "launching epiloq.sort_expert_rows");
}

}  // namespace epiloq::ops::expert_routing
