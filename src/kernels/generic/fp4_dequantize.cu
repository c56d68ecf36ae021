// Dequantises a packed FP4 weight to rows in memory: a thread per lane of a tile, in runs of 16 columns.

#include "core/cuda_check.h"
#include "epiloq/device.h"
#include "kernels/common/device_code.cuh"
#include "kernels/common/fp4_runs.h"
#include "kernels/common/w4a16/dequantize_tiles.cuh"
#include "problems/packed_layout.h"
#include "problems/quantizers/dequantize_fp4.h"

namespace epiloq::ops::dequantize_fp4 {
namespace {

using weight_only_mm::kDequantizeThreads, weight_only_mm::kDequantizeWarps;
using weight_only_mm::kLanes, weight_only_mm::kPanelRows, weight_only_mm::transpose_fours;

constexpr int kBits = 4, kDepth = weight_only_mm::depth(kBits);
constexpr int kMxfp4Block = 32, kNvfp4Block = 16;

__device__ __forceinline__ uint4 codes_of(weight_only_mm::Weight const& w, int tile, int lane) {
  std::int64_t const tiles = w.padded_k / kDepth;
  return __ldg(reinterpret_cast<uint4 const*>(w.q) + (blockIdx.x * tiles + tile) * kLanes + lane);
}

// Bytes of the scales of rows g and g + 8, of a block of the panel.
__device__ __forceinline__ uchar2 scales_of(weight_only_mm::Weight const& w, int block, int g) {
  auto const* const scales = static_cast<std::uint8_t const*>(w.scale);
  return *reinterpret_cast<uchar2 const*>(scales + (std::int64_t{blockIdx.x} * w.groups + block) * kPanelRows + 2 * g);
}

template <class T>
__device__ __forceinline__ void store_run(Problem const& p, int row, int column, T const (&values)[kRun]) {
  std::int64_t const n = std::int64_t{blockIdx.x} * kPanelRows + row;
  if (n >= p.weight.n || column >= p.weight.k) return;
  weight_only_mm::store_run(p.weight, static_cast<T*>(p.out), n, column, values);
}

template <WeightFormat kFormat, class T>
__global__ __launch_bounds__(kDequantizeThreads) void dequantize_kernel(__grid_constant__ Problem const p) {
  pdl_trigger();
  pdl_wait();
  constexpr int kBlock = kFormat == WeightFormat::kMxfp4 ? kMxfp4Block : kNvfp4Block;
  int const lane = threadIdx.x % kLanes, g = lane / 4, tiles = p.weight.padded_k / kDepth;
  // Rows past N belong to the last matrix.
  int const first_row = static_cast<int>(blockIdx.x) * kPanelRows;
  float const factor = p.global_scale != nullptr ? __ldg(p.global_scale + first_row / p.rows_per_factor) : 1.f;
  for (int tile = blockIdx.y * kDequantizeWarps + threadIdx.x / kLanes; tile < tiles;
       tile += gridDim.y * kDequantizeWarps) {
    uint4 const codes = codes_of(p.weight, tile, lane);
    Word run[4] = {codes.x, codes.y, codes.z, codes.w};
    transpose_fours(run);
    int const column = tile * kDepth + lane % 4 * kRun;
    uchar2 const bytes = scales_of(p.weight, column / kBlock, g);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      int const byte = row == 0 ? bytes.x : bytes.y;
      float const scale = __fmul_rn(kFormat == WeightFormat::kMxfp4 ? e8m0_number(byte) : nvfp4_number(byte), factor);
      alignas(16) T values[kRun];
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        values[i] = static_cast<T>(__fmul_rn(number_at(quad_of(run, i / 4), i % 4, row), scale));
      }
      store_run(p, g + 8 * row, column, values);
    }
  }
}

constexpr int kRowThreads = 512, kRowWarps = kRowThreads / kLanes;

// A CTA reads a panel twice: for its rows' largest scales, then for the codes, which caches still hold.
__global__ __launch_bounds__(kRowThreads) void float8_rows_kernel(__grid_constant__ Problem const p) {
  __shared__ int largest[kPanelRows];
  __shared__ Magnitudes magnitudes[kExponents];
  pdl_trigger();
  constexpr int kCodes = sizeof(Magnitudes);
  if (threadIdx.x < kExponents * kCodes) {
    reinterpret_cast<std::uint8_t*>(magnitudes)[threadIdx.x] = magnitude_of(threadIdx.x / kCodes, threadIdx.x % kCodes);
  }
  constexpr int kNone = -1;
  if (threadIdx.x < kPanelRows) largest[threadIdx.x] = kNone;
  __syncthreads();
  pdl_wait();
  int const lane = threadIdx.x % kLanes, g = lane / 4, tiles = p.weight.padded_k / kDepth;
  constexpr int kBlocks = kDepth / kMxfp4Block;  // of a tile
  int low = kNone, high = kNone;
#pragma unroll 2
  for (int tile = threadIdx.x / kLanes; tile < tiles; tile += kRowWarps) {
    uint4 const codes = codes_of(p.weight, tile, lane);
    Word const of_block[kBlocks] = {codes.x | codes.y, codes.z | codes.w};
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      uchar2 const bytes = scales_of(p.weight, tile * kBlocks + block, g);
      if ((of_block[block] & 0x07070707u) != 0 || bytes.x == kE8m0Nan) low = max(low, bytes.x);
      if ((of_block[block] & 0x70707070u) != 0 || bytes.y == kE8m0Nan) high = max(high, bytes.y);
    }
  }
  atomicMax(largest + g, low);
  atomicMax(largest + g + 8, high);
  __syncthreads();
  if (threadIdx.x < kPanelRows) {
    std::int64_t const n = std::int64_t{blockIdx.x} * kPanelRows + threadIdx.x;
    int const byte = largest[threadIdx.x] == kNone ? kE8m0One : largest[threadIdx.x];
    if (n < p.weight.n) p.row_scale[n] = e8m0_number(byte) * (1.f / (1 << kLargestExponent));
  }
#pragma unroll 2
  for (int tile = threadIdx.x / kLanes; tile < tiles; tile += kRowWarps) {
    uint4 const codes = codes_of(p.weight, tile, lane);
    Word run[4] = {codes.x, codes.y, codes.z, codes.w};
    transpose_fours(run);
    int const column = tile * kDepth + lane % 4 * kRun;
    uchar2 const bytes = scales_of(p.weight, column / kMxfp4Block, g);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      Magnitudes const table = magnitudes[exponent_index(row == 0 ? bytes.x : bytes.y, largest[g + 8 * row])];
      alignas(16) std::uint8_t values[kRun];
#pragma unroll
      for (int q = 0; q < kRun / 4; ++q) {
        reinterpret_cast<Word*>(values)[q] = float8_of(quad_of(run, q), row, table);
      }
      store_run(p, g + 8 * row, column, values);
    }
  }
}

template <class T>
void launch_typed(Problem const& p, int device, Stream stream) {
  auto* const kernel = p.format == WeightFormat::kMxfp4 ? &dequantize_kernel<WeightFormat::kMxfp4, T>
                                                        : &dequantize_kernel<WeightFormat::kNvfp4, T>;
  dim3 const grid = weight_only_mm::dequantize_grid(p.weight.n, p.weight.padded_k / kDepth, device);
  cuda_check(launch_pdl(kernel, grid, kDequantizeThreads, 0, stream, p), "launching epiloq.dequantize_fp4");
}

}  // namespace

void launch(Problem const& p, DType out, int device, Stream stream) {
  DeviceGuard const guard(device);
  switch (out) {
    case DType::kFloat16:
      return launch_typed<__half>(p, device, stream);
    case DType::kBFloat16:
      return launch_typed<__nv_bfloat16>(p, device, stream);
    case DType::kFloat32:
      return launch_typed<float>(p, device, stream);
    default:
      unsigned const panels = (p.weight.n + kPanelRows - 1) / kPanelRows;
      cuda_check(launch_pdl(&float8_rows_kernel, panels, kRowThreads, 0, stream, p),
                 "launching epiloq.dequantize_fp4's rows of float8");
  }
}

}  // namespace epiloq::ops::dequantize_fp4
