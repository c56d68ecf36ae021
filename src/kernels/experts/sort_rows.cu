// Stable sort of a few rows by expert, in one CTA: each row counts those that come before it.

#include "core/cuda_check.h"
#include "epiloq/device.h"
#include "kernels/common/device_code.cuh"
#include "problems/experts/expert_routing.h"

namespace epiloq::ops::expert_routing {
namespace {

constexpr int kThreads = 512;
static_assert(kMostSortedRows <= kThreads);

__global__ __launch_bounds__(kThreads) void sort_kernel(__grid_constant__ SortProblem const p) {
  __shared__ int expert_of_row[kMostSortedRows];
  pdl_wait();
  pdl_trigger();
  int const row = threadIdx.x;
  int own = p.experts;  // of rows without an expert here
  if (row < p.rows) {
    std::int64_t const expert = p.expert_of_row[row];
    if (expert >= 0 && expert < p.experts) own = static_cast<int>(expert);
    expert_of_row[row] = own;
  }
  __syncthreads();
  if (row < p.rows) {
    int place = 0;
#pragma unroll 4
    for (int other = 0; other < p.rows; ++other) {
      int const expert = expert_of_row[other];
      place += expert < own || (expert == own && other < row);
    }
    p.order[place] = row, p.tokens[place] = row / p.top_k, p.places[row] = place;
  }
  for (int expert = threadIdx.x; expert < p.experts; expert += kThreads) {
    int end = 0;
#pragma unroll 4
    for (int other = 0; other < p.rows; ++other) end += expert_of_row[other] <= expert;
    p.ends[expert] = end;
  }
}

}  // namespace

void launch_sort(SortProblem const& p, int device, Stream stream) {
  DeviceGuard const guard(device);
  cuda_check(launch_pdl(&sort_kernel, dim3(1), kThreads, 0, stream, p), "launching epiloq.sort_expert_rows");
}

}  // namespace epiloq::ops::expert_routing
