// Rows of a mixture, sorted by expert and quantised. A CTA has a row. Up to kMostCountedRows of them, it counts the
// rows before its own, so that no launch sorts them first, and one more CTA writes the experts' ends; otherwise the
// rows are sorted already.

#include <cub/block/block_scan.cuh>
#include <cuda/std/type_traits>

#include "core/cuda_check.h"
#include "epiloq/device.h"
#include "kernels/experts/expert_of.cuh"
#include "kernels/quantize/quantized_rows.cuh"
#include "kernels/quantize/spread_launch.cuh"
#include "problems/experts/expert_routing.h"

namespace epiloq::ops::expert_routing {
namespace {

constexpr int kThreads = 256;
static_assert(kMostGatheredColumns <= kThreads * kVector * 4);

struct Unquantized {};

__device__ __forceinline__ int count_before(SortProblem const& p, int row, int expert) {
  int count = 0;
  for (int begin = 0; begin < p.rows; begin += kThreads) {
    int const other = begin + threadIdx.x;
    int const of_other = other < p.rows ? expert_of(p, other) : p.experts + 1;
    count += __syncthreads_count(of_other < expert || (of_other == expert && other < row));
  }
  return count;
}

__device__ void write_ends(SortProblem const& p) {
  constexpr int kBins = kMostExperts / kThreads;
  using Scan = cub::BlockScan<int, kThreads>;
  __shared__ typename Scan::TempStorage scan;
  __shared__ int counts[kMostExperts];
#pragma unroll
  for (int i = 0; i < kBins; ++i) counts[i * kThreads + threadIdx.x] = 0;
  __syncthreads();
  for (int row = threadIdx.x; row < p.rows; row += kThreads) {
    int const expert = expert_of(p, row);
    if (expert < p.experts) atomicAdd(counts + expert, 1);
  }
  __syncthreads();
  int ends[kBins];
#pragma unroll
  for (int i = 0; i < kBins; ++i) ends[i] = counts[threadIdx.x * kBins + i];
  Scan(scan).InclusiveSum(ends, ends);
#pragma unroll
  for (int i = 0; i < kBins; ++i) {
    int const expert = threadIdx.x * kBins + i;
    if (expert < p.experts) p.ends[expert] = ends[i];
  }
}

template <class T, int kVectors>
__device__ __forceinline__ void load_row(GatherProblem const& p, int token, Vector<T> (&held)[kVectors]) {
  T const* const x = static_cast<T const*>(p.x) + token * p.stride_x;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    int const column = (v * kThreads + threadIdx.x) * kVector;
    bool const is_valid = column < p.out.cols;
    if (p.in_vectors) {
      held[v].load_if(is_valid, x + column);
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) held[v].values[i] = is_valid ? x[column + i] : T{};
    }
  }
}

// With no number (0) ptxas 13.0 spills registers of unquantised rows on SM80.
template <class Format>
constexpr int kCtasPerSm = cuda::std::is_same_v<Format, Unquantized> ? 7 : 0;

// T of unquantised rows is any type of 16 bits.
template <class T, class Format, int kVectors>
__global__ __launch_bounds__(kThreads, kCtasPerSm<Format>) void gather_kernel(__grid_constant__ GatherProblem const p,
                                                                              bool counts) {
  pdl_wait();
  SortProblem const& sort = p.sort;
  int place = blockIdx.x;
  if (place == sort.rows) return write_ends(sort);
  Vector<T> held[kVectors];
  if (counts) {
    int const row = blockIdx.x, token = row / sort.top_k, expert = expert_of(sort, row);
    load_row(p, token, held);
    place = count_before(sort, row, expert);
    if (threadIdx.x == 0) sort.places[row] = place, sort.tokens[place] = token;
    if (expert == sort.experts) return;
  } else {
    if (place >= sort.ends[sort.experts - 1]) return;
    load_row(p, static_cast<int>(sort.tokens[place]), held);
  }
  if constexpr (cuda::std::is_same_v<Format, Unquantized>) {
    pdl_trigger();
    T* const out = reinterpret_cast<T*>(p.out.q) + place * p.out.stride_q;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      int const column = (v * kThreads + threadIdx.x) * kVector;
      if (column < p.out.cols) held[v].store(out + column);
    }
  } else {
    float values[kVectors][kVector];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) held[v].widen(values[v]);
    quantize_row<Format>(p.out, place, values);
  }
}

template <class T, class Format>
void launch_typed(GatherProblem const& p, Stream stream) {
  bool const counts = p.sort.rows <= kMostCountedRows;
  auto* const kernel = p.out.cols <= kThreads * kVector ? &gather_kernel<T, Format, 1> : &gather_kernel<T, Format, 4>;
  launch_spread("launching epiloq.gather_expert_rows", kernel, dim3(p.sort.rows + (counts ? 1 : 0)), dim3(kThreads),
                stream, p, counts);
}

template <class T>
void launch_quantized(GatherProblem const& p, DType rows, Stream stream) {
  (rows == DType::kInt8 ? launch_typed<T, Int8> : launch_typed<T, E4M3>)(p, stream);
}

}  // namespace

void launch_gather(GatherProblem const& p, DType x, DType rows, int device, Stream stream) {
  DeviceGuard const guard(device);
  if (p.sort.rows > kMostCountedRows) launch_sort(p.sort, device, stream);
  if (rows == x) return launch_typed<__half, Unquantized>(p, stream);
  (x == DType::kFloat16 ? launch_quantized<__half> : launch_quantized<__nv_bfloat16>)(p, rows, stream);
}

}  // namespace epiloq::ops::expert_routing
