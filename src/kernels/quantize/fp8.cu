// FP8 quantisation with a scale per tensor, row, group of a row or 128 x 128 block, static or measured. fp8_plan.h
// chooses the kernel: where elements fit in registers they are read once. A measured per-tensor scale takes a pass of
// its own.

#include <algorithm>
#include <bit>

#include "core/checks.h"
#include "core/cuda_check.h"
#include "epiloq/device.h"
#include "kernels/common/device_code.cuh"
#include "kernels/quantize/fp8_plan.h"
#include "kernels/quantize/quantize.cuh"
#include "kernels/quantize/spread_launch.cuh"

namespace epiloq::ops::quantize_fp8 {
namespace {

constexpr int kTileThreads = 512, kTileVectors = kPerLane / kVector, kBlockSide = 128, kBlockThreads = 256,
              kMeasureThreads = 256;

// The given scale, or the measured one, which one thread writes.
template <class Format>
__device__ __forceinline__ Divisor divisor_of(Problem const& p, std::int64_t row, int col, float amax, bool writes) {
  float* const target = p.scale + row * p.scale_row + col * p.scale_col;
  if (p.is_static) return divide_by(*target);
  float const scale = scale_of(amax, Format::kMax, p.rule);
  if (writes) *target = scale;
  return divide_by(scale);
}

// Quantises where x has columns, writes 0 in the padding.
template <class Format, class T>
__device__ __forceinline__ void store(Problem const& p, Vector<T> const& x, std::uint8_t* q_row, int column,
                                      Divisor const& divisor) {
  if (column >= p.padded_cols) return;
  uint2 bytes{};
  if (column < p.cols) {
    float values[kVector];
    x.widen(values);
    bytes = quantize<Format, kExactSteps<T>>(values, divisor);
  }
  *reinterpret_cast<uint2*>(q_row + column) = bytes;
}

// `lanes` neighbours, a power of two, share a tile of one row; a CTA takes some tiles of some rows.
struct TileGrid {
  int lanes, lane_bits, parts;  // parts: blocks along a row
  bool from_the_end;            // the last rows first: the second-level cache may still hold what was read last
};

template <class T, class Format>
__global__ void __launch_bounds__(kTileThreads)
    tiles(__grid_constant__ Problem const p, __grid_constant__ TileGrid const grid) {
  pdl_wait();
  unsigned const block_row = grid.parts == 1 ? blockIdx.x : blockIdx.x / grid.parts;
  unsigned const index = block_row * blockDim.y + threadIdx.y;
  bool const in_rows = index < p.rows;
  int const row = grid.from_the_end ? p.rows - 1 - index : index;
  int const part = blockIdx.x - block_row * grid.parts, lane = threadIdx.x & (grid.lanes - 1);
  int const tile = (part * blockDim.x + threadIdx.x) >> grid.lane_bits;
  int const column = tile * p.tile_cols + lane * kVector, step = grid.lanes * kVector;
  T const* const x = static_cast<T const*>(p.x) + row * p.stride_x + column;
  Vector<T> held[kTileVectors];
#pragma unroll
  for (int v = 0; v < kTileVectors; ++v) held[v].load_if(in_rows && column + v * step < p.cols, x + v * step);
  pdl_trigger();
  float amax = 0.f;
  if (!p.is_static) {
#pragma unroll
    for (int v = 0; v < kTileVectors; ++v) amax = max_nan(amax, held[v].largest());
    amax = largest_of(amax, grid.lanes);
  }
  if (!in_rows) return;
  Divisor const divisor = tile < p.tiles ? divisor_of<Format>(p, row, tile, amax, lane == 0) : divide_by(1.f);
  std::uint8_t* const q = p.q + row * p.stride_q;
#pragma unroll
  for (int v = 0; v < kTileVectors; ++v) store<Format>(p, held[v], q, column + v * step, divisor);
}

// One CTA per row, held in registers.
template <class T, class Format, int kVectors>
__global__ void __launch_bounds__(kMaxThreads) rows(__grid_constant__ Problem const p) {
  pdl_wait();
  int const row = blockIdx.x, column = threadIdx.x * kVector, step = blockDim.x * kVector;
  T const* const x = static_cast<T const*>(p.x) + row * p.stride_x + column;
  Vector<T> held[kVectors];
  float amax = 0.f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) held[v].load_if(column + v * step < p.cols, x + v * step);
  pdl_trigger_if_few();
#pragma unroll
  for (int v = 0; v < kVectors; ++v) amax = max_nan(amax, held[v].largest());
  amax = largest_of_block(amax);
  pdl_trigger();  // not sooner: CTAs that wait would displace CTAs that read
  Divisor const divisor = divisor_of<Format>(p, row, 0, amax, threadIdx.x == 0);
  std::uint8_t* const q = p.q + row * p.stride_q;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) store<Format>(p, held[v], q, column + v * step, divisor);
  for (int c = column + kVectors * step; c < p.padded_cols; c += step) *reinterpret_cast<uint2*>(q + c) = {};
}

// One CTA per 128 x 128 elements, held in registers.
template <class T, class Format>
__global__ void __launch_bounds__(kBlockThreads) blocks(__grid_constant__ Problem const p, int across) {
  constexpr int kAcross = kBlockSide / kVector, kDown = kBlockThreads / kAcross, kVectors = kBlockSide / kDown;
  pdl_wait();
  int const down = blockIdx.x / across, col = blockIdx.x - down * across;
  int const column = col * kBlockSide + threadIdx.x % kAcross * kVector;
  std::int64_t const first_row = std::int64_t{down} * kBlockSide + threadIdx.x / kAcross;
  T const* const x = static_cast<T const*>(p.x) + first_row * p.stride_x + column;
  std::uint8_t* const q = p.q + first_row * p.stride_q;
  bool const in_cols = column < p.cols;
  Vector<T> held[kVectors];
  float amax = 0.f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    held[v].load_if(in_cols && first_row + v * kDown < p.rows, x + v * kDown * p.stride_x);
  }
  if (!p.is_static) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) amax = max_nan(amax, held[v].largest());
    amax = largest_of_block(amax);
  }
  pdl_trigger();
  Divisor const divisor = col < p.tiles ? divisor_of<Format>(p, down, col, amax, threadIdx.x == 0) : divide_by(1.f);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (first_row + v * kDown < p.rows) store<Format>(p, held[v], q + v * kDown * p.stride_q, column, divisor);
  }
}

// Unaligned or long rows and unusual tile sizes: one CTA per tile, in two passes.
template <class T, class Format>
__global__ void __launch_bounds__(kMaxThreads) elements(__grid_constant__ Problem const p, int across) {
  pdl_wait();
  pdl_trigger();
  std::int64_t const all = (p.rows + std::int64_t{p.tile_rows} - 1) / p.tile_rows * across;
  for (std::int64_t index = blockIdx.x; index < all; index += gridDim.x) {
    std::int64_t const down = index / across, col = index - down * across;
    std::int64_t const first = down * p.tile_rows, last = min(first + p.tile_rows, std::int64_t{p.rows});
    std::int64_t const begin = col * p.tile_cols, end = min(begin + p.tile_cols, std::int64_t{p.padded_cols});
    auto const for_each = [&](std::int64_t to, auto take) {
      for (std::int64_t row = first; row < last; ++row) {
        for (std::int64_t c = begin + threadIdx.x; c < to; c += blockDim.x) {
          take(row, c, c < p.cols ? static_cast<float>(static_cast<T const*>(p.x)[row * p.stride_x + c]) : 0.f);
        }
      }
    };
    float amax = 0.f;
    if (!p.is_static) {
      for_each(min(end, std::int64_t{p.cols}),
               [&](std::int64_t, std::int64_t, float value) { amax = max_nan(amax, fabsf(value)); });
      amax = largest_of_block(amax);
      __syncthreads();
    }
    float const scale = col < p.tiles ? divisor_of<Format>(p, down, col, amax, threadIdx.x == 0).scale : 1.f;
    for_each(end, [&](std::int64_t row, std::int64_t c, float value) {
      float const result = c < p.cols ? __fdiv_rn(value, scale) : 0.f;
      p.q[row * p.stride_q + c] = static_cast<std::uint8_t>(pack<Format>(result, 0.f, 0.f, 0.f));
    });
  }
}

// Per-tensor scale. Scales grow with amax, and non-negative floats order as their bits do (NaN last), so CTAs need not
// wait for each other: the largest of their scales is exact in any order.
struct Span {
  std::int64_t rows, cols, stride;
  bool in_vectors;
};

template <class T, class Format>
__global__ void __launch_bounds__(kMeasureThreads)
    measure(__grid_constant__ Problem const p, __grid_constant__ Span const span) {
  constexpr int kBatch = 64 / (kVector * static_cast<int>(sizeof(T)));  // 64 bytes per thread in flight
  pdl_wait();
  float amax = 0.f;
  std::int64_t const thread = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x, threads = gridDim.x * blockDim.x;
  std::int64_t const vectors = span.in_vectors ? span.cols / kVector : 0;
  for (std::int64_t row = blockIdx.y; row < span.rows; row += gridDim.y) {
    T const* const x = static_cast<T const*>(p.x) + row * span.stride;
    for (std::int64_t v = thread; v < vectors; v += kBatch * threads) {
      Vector<T> held[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) held[i].load_if(v + i * threads < vectors, x + (v + i * threads) * kVector);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) amax = max_nan(amax, held[i].largest());
    }
    for (std::int64_t c = vectors * kVector + thread; c < span.cols; c += threads) {
      amax = max_nan(amax, fabsf(static_cast<float>(x[c])));
    }
  }
  amax = largest_of_block(amax);
  pdl_trigger();
  if (threadIdx.x == 0)
    atomicMax(reinterpret_cast<int*>(p.scale), __float_as_int(scale_of(amax, Format::kMax, p.rule)));
}

char const* const kDoing = "launching epiloq.quantize_fp8";

template <class... Parameters, class... Arguments>
void run(void (*kernel)(Parameters...), std::int64_t blocks, dim3 threads, Stream stream, Arguments... arguments) {
  launch_spread(kDoing, kernel, dim3(static_cast<unsigned>(blocks)), threads, stream, arguments...);
}

int round_up(int value, int multiple) { return static_cast<int>(ceil_div(value, multiple)) * multiple; }

template <class T, class Format>
void run_tiles(Problem p, int lanes, bool from_the_end, Stream stream) {
  constexpr int kPreferredThreads = 256;
  p.tile_cols = kPerLane * lanes;
  int const across = static_cast<int>(std::max<std::int64_t>(1, ceil_div(p.padded_cols, p.tile_cols)));
  if (p.is_static && p.scale_col == 0) p.tiles = across;  // all of a row's tiles share a scale
  int const most = kTileThreads / lanes, parts = static_cast<int>(ceil_div(across, most));
  int const row_threads = static_cast<int>(ceil_div(across, parts)) * lanes;
  // Whole warps: several short rows per warp, or idle lanes at the end of a long row.
  unsigned const x = row_threads < 32 ? std::bit_ceil(static_cast<unsigned>(row_threads)) : round_up(row_threads, 32);
  unsigned const y = std::max(1u, kPreferredThreads / x);
  int const lane_bits = std::countr_zero(static_cast<unsigned>(lanes));
  TileGrid const grid{lanes, lane_bits, static_cast<int>(ceil_div(across, x / lanes)), from_the_end};
  run(tiles<T, Format>, ceil_div(p.rows, y) * grid.parts, dim3(x, y), stream, p, grid);
}

template <class T, class Format>
void run_rows(Problem const& p, int device, Stream stream) {
  // Few rows get many threads each, for latency; many rows more work per thread, which shares the cost of a scale.
  struct Variant {
    int vectors;
    void (*kernel)(Problem);
  };
  constexpr Variant kVariants[] = {{1, rows<T, Format, 1>}, {2, rows<T, Format, 2>}, {4, rows<T, Format, 4>}};
  bool const few = p.rows <= 2 * device_properties(device).sm_count;
  int const vectors = p.cols / kVector;
  Variant const* const last = std::end(kVariants) - 1;
  Variant const* const chosen = std::find_if(few ? std::begin(kVariants) : last, last,
                                             [=](Variant const& v) { return vectors <= v.vectors * kMaxThreads; });
  run(chosen->kernel, p.rows, round_up(static_cast<int>(ceil_div(vectors, chosen->vectors)), 32), stream, p);
}

template <class T, class Format>
void run_elements(Problem const& p, Stream stream) {
  constexpr std::int64_t kMaxBlocks = (std::int64_t{1} << 31) - 1;
  std::int64_t const across = std::max<std::int64_t>(1, ceil_div(p.padded_cols, p.tile_cols));
  std::int64_t const count = ceil_div(p.rows, p.tile_rows) * across;
  int const threads = std::min(round_up(std::min(p.tile_cols, kMaxThreads), 32), kMaxThreads);
  run(elements<T, Format>, std::min(count, kMaxBlocks), threads, stream, p, static_cast<int>(across));
}

template <class T, class Format>
void run_measure(Problem const& p, DType x, int device, Stream stream) {
  constexpr int kBlocksPerSm = 8;
  bool const dense = p.stride_x == p.cols;
  Span span{p.rows, p.cols, p.stride_x, false};
  if (dense) span = {1, std::int64_t{p.rows} * p.cols, 0, false};
  span.in_vectors = reinterpret_cast<std::uintptr_t>(p.x) % 16 == 0 && span.stride * size_of(x) % 16 == 0;
  std::int64_t const wanted = ceil_div(span.cols, kMeasureThreads * kVector);
  std::int64_t const most = kBlocksPerSm * device_properties(device).sm_count;
  std::int64_t const across = std::clamp<std::int64_t>(wanted, 1, most);
  std::int64_t const down = std::clamp<std::int64_t>(most / across, 1, span.rows);
  cuda_check(cudaMemsetAsync(p.scale, 0, sizeof(float), stream), "clearing the scale of epiloq.quantize_fp8");
  launch_spread(kDoing, measure<T, Format>, dim3(across, down), kMeasureThreads, stream, p, span);
}

template <class T, class Format>
void run_planned(Problem p, DType x, int device, Stream stream) {
  bool const measured = p.granularity == Granularity::kTensor && !p.is_static;
  if (measured) run_measure<T, Format>(p, x, device, stream);
  if (p.granularity == Granularity::kTensor) p.is_static = true, p.tile_rows = 1;
  if (p.padded_cols == 0 && p.is_static) return;
  Plan const chosen = plan(p, x);
  switch (chosen.kernel) {
    case Kernel::kTiles:
      return run_tiles<T, Format>(p, chosen.lanes, measured, stream);
    case Kernel::kRows:
      return run_rows<T, Format>(p, device, stream);
    case Kernel::kBlocks: {
      std::int64_t const across = std::max<std::int64_t>(1, ceil_div(p.padded_cols, kBlockSide));
      return run(blocks<T, Format>, ceil_div(p.rows, kBlockSide) * across, kBlockThreads, stream, p,
                 static_cast<int>(across));
    }
    case Kernel::kElements:
      return run_elements<T, Format>(p, stream);
  }
}

template <class T>
void run_format(Problem const& p, DType x, DType q, int device, Stream stream) {
  (q == DType::kFloat8E4M3 ? run_planned<T, E4M3> : run_planned<T, E5M2>)(p, x, device, stream);
}

}  // namespace

void launch(Problem const& problem, DType x, DType q, int device, Stream stream) {
  DeviceGuard const guard(device);
  switch (x) {
    case DType::kFloat16:
      return run_format<__half>(problem, x, q, device, stream);
    case DType::kBFloat16:
      return run_format<__nv_bfloat16>(problem, x, q, device, stream);
    default:
      return run_format<float>(problem, x, q, device, stream);
  }
}

}  // namespace epiloq::ops::quantize_fp8
