// Dynamic int8 quantisation in blocks along rows: q = round((x - offset) / scale), with the parameters in the layout of
// problems/quantizers/quantize_blockwise_int8.h. Blocks whose values neighbouring lanes hold in registers are read once
// (by_lanes, by_few_lanes); any other block is read twice by one warp (by_warp).

#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>

#include "core/cuda_check.h"
#include "kernels/common/device_code.cuh"
#include "kernels/common/ptx/tf32.cuh"
#include "kernels/quantize/quantize.cuh"
#include "kernels/quantize/spread_launch.cuh"
#include "problems/quantizers/quantize_blockwise_int8.h"

namespace epiloq::ops::quantize_blockwise_int8 {
namespace {

constexpr int kBlockThreads = 256;
constexpr int kMaxGridY = 65535;
// Vectors per thread of by_lanes: more if there is enough work, as the cost per quantisation block is shared.
constexpr int kFewVectors = 2, kManyVectors = 4;
constexpr std::int64_t kManyValues = 1 << 21;
constexpr int kFewWarps = 4;  // per CTA of by_few_lanes
constexpr float kLargest = 3.402823466e38f;

struct Parameters {
  float scale, offset;
};

// One rounding per operation, as on the host. Of no values: 0.
__device__ Parameters measure(Range range, bool symmetric) {
  if (range.hi < range.lo) return {0.f, 0.f};
  float const reach = symmetric ? max_nan(-range.lo, range.hi) : __fsub_rn(range.hi, range.lo);
  float const nan = __int_as_float(0x7fffffff);
  if (!(reach <= kLargest)) return {nan, symmetric ? 0.f : nan};
  float const scale = reach == 0.f ? 1.f : fmaxf(__fdiv_rn(reach, symmetric ? 127.f : 255.f), kSmallestScale);
  if (symmetric) return {scale, 0.f};
  // + 0 turns -0 into 0
  return {scale, reach == 0.f ? __fadd_rn(range.hi, 0.f) : __fsub_rn(range.hi, __fmul_rn(127.f, scale))};
}

__device__ __forceinline__ int define(float x, Parameters p) {
  float const rounded = rintf(__fdiv_rn(__fsub_rn(x, p.offset), p.scale));
  return static_cast<int>(fminf(fmaxf(rounded == rounded ? rounded : 0.f, -128.f), 127.f));
}

// Adds four signed bytes to a sum.
__device__ __forceinline__ int add_bytes(unsigned bytes, int sum) {
  return __dp4a(static_cast<int>(bytes), 0x01010101, sum);
}

// Over `lanes` neighbouring threads, a power of two.
__device__ __forceinline__ int add_lanes(int sum, int lanes) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  return sum;
}

__device__ void store_parameter(Problem const& p, float* to, float x) {
  if (p.in_tf32_parts) {
    float const high = high_tf32(x), low = low_tf32(x);
    *reinterpret_cast<float4*>(to) = {high, low, high, low};
  } else {
    *to = x;
  }
}

// The lanes that share a block distribute its kinds of parameters among them.
__device__ __forceinline__ void store_parameters(Problem const& p, int lane, int lanes, int row, int block,
                                                 Parameters parameters, int sum) {
  std::int64_t const i = row * p.row_stride + block * p.block_stride;
  constexpr int kKinds = 4;
#pragma unroll 1
  for (int kind = lane; kind < kKinds; kind += lanes) {
    if (kind == 3) {
      if (p.sum != nullptr) p.sum[i] = sum;
      return;
    }
    float* const to = kind == 0 ? p.scale : kind == 1 ? p.offset : p.scaled_sum;
    float const scaled_sum = __fmul_rn(parameters.scale, static_cast<float>(sum));
    float const x = kind == 0 ? parameters.scale : kind == 1 ? parameters.offset : scaled_sum;
    if (to != nullptr) store_parameter(p, to + i, x);
  }
}

// `left` values remain in the row, possibly a negative number: the last value is repeated, which does not change the
// range; of no values, zeros.
template <class T>
__device__ void load(Vector<T>& values, T const* source, int left, bool vectors) {
  if (vectors && left >= kVector) return values.load(source);
  values.clear();
  if (left <= 0) return;
#pragma unroll
  for (int i = 0; i < kVector; ++i) values.values[i] = source[min(i, left - 1)];
}

__device__ void store(std::int8_t* target, int room, bool vectors, uint2 bytes) {
  if (vectors && room >= kVector) {
    *reinterpret_cast<uint2*>(target) = bytes;
    return;
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (i < room) target[i] = static_cast<std::int8_t>((i < 4 ? bytes.x : bytes.y) >> i % 4 * 8);
  }
}

// The first `left` of eight bytes, and zeros.
__device__ __forceinline__ uint2 first_of(uint2 bytes, int left) {
  if (left >= kVector) return bytes;
  auto const mask = left <= 0 ? 0ull : ~0ull >> 8 * (kVector - left);
  return {bytes.x & static_cast<unsigned>(mask), bytes.y & static_cast<unsigned>(mask >> 32)};
}

// The definition's values for the `left` that exist, then zeros. Quotients by a measured scale are small.
__device__ __forceinline__ uint2 quantize(float const (&x)[kVector], int left, Parameters p, Divisor const& divisor) {
  int q[kVector];
  if (divisor.in_range) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      q[i] = __float2int_rn(quotient<kExactSteps<float>, true>(__fsub_rn(x[i], p.offset), divisor));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) q[i] = define(x[i], p);
  }
  return first_of({pack(q[0], q[1], q[2], q[3]), pack(q[4], q[5], q[6], q[7])}, left);
}

// Blocks of 8 * kVectors * lanes values, lanes a power of two up to 32: each value is read once. Neighbours' vectors
// are adjacent.
template <class T, int kVectors>
__global__ void __launch_bounds__(kBlockThreads)
    by_lanes(__grid_constant__ Problem const p, int lanes, bool x_vectors, bool q_vectors) {
  pdl_wait();
  int const row = blockIdx.x;
  int const cols = row < p.rows ? p.cols : 0, padded_cols = row < p.rows ? p.padded_cols : 0;
  int const vectors = (p.padded_cols + p.group - 1) / p.group * lanes;
  T const* const x_row = static_cast<T const*>(p.x) + row * p.stride_x;
  std::int8_t* const q_row = p.q + row * p.stride_q;
  pdl_trigger();
  // Whole warps stay in the loop, as they shuffle.
  for (int first = blockIdx.y * blockDim.x; first < vectors; first += gridDim.y * blockDim.x) {
    int const vector = first + threadIdx.x, lane = vector & (lanes - 1);
    int const column = ((vector - lane) * kVectors + lane) * kVector, step = lanes * kVector;
    auto const left = [&](int v) { return cols - column - v * step; };
    Vector<T> held[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) load(held[v], x_row + column + v * step, left(v), x_vectors);
    Range range = empty();
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (left(v) > 0) range = merge(range, held[v].range());
    }
    Parameters const parameters = measure(merge_lanes(range, lanes), p.offset == nullptr);
    Divisor const divisor = divide_by(parameters.scale);
    uint2 bytes[kVectors];
    int sum = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float x[kVector];
      held[v].widen(x);
      bytes[v] = quantize(x, left(v), parameters, divisor);
      sum = add_bytes(bytes[v].y, add_bytes(bytes[v].x, sum));
    }
    sum = add_lanes(sum, lanes);
    if (vector >= vectors) continue;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      int const to = column + v * step;
      store(q_row + to, padded_cols - to, q_vectors, bytes[v]);
    }
    store_parameters(p, lane, lanes, row, vector / lanes, parameters, sum);
  }
}

// Blocks of 8 * kVectors * kLanes values in whole vectors. A warp's blocks are of as many rows if parameters of
// neighbouring rows are adjacent in memory, else of one row. Saves by_lanes's work per vector.
template <class T, int kLanes, int kVectors>
__global__ void __launch_bounds__(kFewWarps * 32) by_few_lanes(__grid_constant__ Problem const p, bool across_rows) {
  constexpr int kStep = kLanes * kVector, kGroup = kVectors * kStep, kBlocksOfWarp = 32 / kLanes;
  pdl_wait();
  pdl_trigger();
  int const lane = threadIdx.x % kLanes, slot = threadIdx.x % 32 / kLanes;
  int const warp = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32;
  int const row = across_rows ? blockIdx.x * kBlocksOfWarp + slot : blockIdx.x;
  int const block = across_rows ? warp : warp * kBlocksOfWarp + slot;
  int const column = block * kGroup + lane * kVector;
  // Past the last values the last ones are repeated, which does not change the range.
  T const* const x = static_cast<T const*>(p.x) + min(row, p.rows - 1) * p.stride_x;
  Vector<T> held[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) held[v].load(x + min(column + v * kStep, p.cols - kVector));
  Range range = held[0].range();
#pragma unroll
  for (int v = 1; v < kVectors; ++v) range = merge(range, held[v].range());
  Range const merged = merge_lanes(range, kLanes);  // by whole warps, whose last blocks may be empty
  bool const has_values = row < p.rows && block * kGroup < p.cols;
  Parameters const parameters = measure(has_values ? merged : empty(), p.offset == nullptr);
  Divisor const divisor = divide_by(parameters.scale);
  uint2 bytes[kVectors];
  int sum = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float values[kVector];
    held[v].widen(values);
    bytes[v] = quantize(values, row < p.rows ? p.cols - column - v * kStep : 0, parameters, divisor);
    sum = add_bytes(bytes[v].y, add_bytes(bytes[v].x, sum));
  }
  sum = add_lanes(sum, kLanes);
  if (row >= p.parameter_rows || block * kGroup >= p.padded_cols) return;
  std::int8_t* const q = p.q + row * p.stride_q + column;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (row < p.rows && column + v * kStep < p.padded_cols) *reinterpret_cast<uint2*>(q + v * kStep) = bytes[v];
  }
  store_parameters(p, lane, kLanes, row, block, parameters, sum);
}

// Blocks of any size, one warp each; read twice.
template <class T>
__global__ void __launch_bounds__(kBlockThreads) by_warp(__grid_constant__ Problem const p) {
  pdl_wait();
  int const row = blockIdx.x, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  T const* const x = static_cast<T const*>(p.x) + row * p.stride_x;
  std::int8_t* const q = p.q + row * p.stride_q;
  int const blocks = (p.cols + p.group - 1) / p.group;
  pdl_trigger();
  for (int block = blockIdx.y * warps + threadIdx.x / 32; block < blocks; block += gridDim.y * warps) {
    int const begin = block * p.group, end = row < p.rows ? min(begin + p.group, p.cols) : begin;
    Range range = empty();
    for (int c = begin + lane; c < end; c += 32) {
      float const value = static_cast<float>(x[c]);
      range = merge(range, {value, value});
    }
    Parameters const parameters = measure(merge_lanes(range, 32), p.offset == nullptr);
    int sum = 0;
    for (int c = begin + lane; c < end; c += 32) {
      int const value = define(static_cast<float>(x[c]), parameters);
      q[c] = static_cast<std::int8_t>(value);
      sum += value;
    }
    sum = add_lanes(sum, 32);
    store_parameters(p, lane, 32, row, block, parameters, sum);
  }
  if (blockIdx.y == 0 && row < p.rows) {
    for (int c = p.cols + threadIdx.x; c < p.padded_cols; c += blockDim.x) q[c] = 0;
  }
}

char const* const kDoing = "launching epiloq.quantize_blockwise_int8";

dim3 grid_of(Problem const& p, int vectors, int each) {
  return dim3(p.parameter_rows, std::clamp((vectors + each - 1) / each, 1, kMaxGridY));
}

// Whether rows of x are whole 16 bytes apart, and those of q vectors.
struct Aligned {
  bool x, q;
  explicit Aligned(Problem const& p, int size) {
    auto const on = [](void const* at, int bytes) { return reinterpret_cast<std::uintptr_t>(at) % bytes == 0; };
    x = on(p.x, 16) && p.stride_x % (16 / size) == 0;
    q = on(p.q, kVector) && p.stride_q % kVector == 0;
  }
};

int blocks_of(Problem const& p) { return (p.padded_cols + p.group - 1) / p.group; }

// Launches by_few_lanes if it supports the problem; returns whether it does.
template <class T, int kLanes, int kVectors>
bool launch_few_lanes(Problem const& p, Aligned const& aligned, Stream stream) {
  bool const whole = p.cols >= kVector && p.cols % kVector == 0 && p.padded_cols % kVector == 0;
  if (p.group != kVectors * kLanes * kVector || !whole || !aligned.x || !aligned.q) return false;
  constexpr int kBlocksOfWarp = 32 / kLanes;
  bool const across_rows = p.row_stride < p.block_stride;
  int const of_warp = across_rows ? 1 : kBlocksOfWarp, wanted = (blocks_of(p) + of_warp - 1) / of_warp;
  int const warps = std::min(kFewWarps, wanted), along_row = (wanted + warps - 1) / warps;
  if (along_row > kMaxGridY) return false;
  int const of_rows = across_rows ? kBlocksOfWarp : 1;
  dim3 const grid((p.parameter_rows + of_rows - 1) / of_rows, along_row);
  launch_spread(kDoing, by_few_lanes<T, kLanes, kVectors>, grid, 32 * warps, stream, p, across_rows);
  return true;
}

template <class T, int kVectors>
void launch_lanes(Problem const& p, int lanes, Aligned const& aligned, Stream stream) {
  int const vectors = blocks_of(p) * lanes, threads = std::min(kBlockThreads, (vectors + 31) / 32 * 32);
  launch_spread(kDoing, by_lanes<T, kVectors>, grid_of(p, vectors, threads), threads, stream, p, lanes, aligned.x,
                aligned.q);
}

template <class T>
void launch_typed(Problem const& p, Stream stream) {
  Aligned const aligned(p, sizeof(T));
  if (launch_few_lanes<T, 2, 2>(p, aligned, stream) || launch_few_lanes<T, 4, 2>(p, aligned, stream) ||
      launch_few_lanes<T, 8, 2>(p, aligned, stream)) {
    return;
  }
  auto const by = [&]<int kVectors>(std::integral_constant<int, kVectors>) {
    int const lanes = p.group / (kVectors * kVector);
    bool const fits = p.group % (kVectors * kVector) == 0 && lanes <= 32 && std::has_single_bit(unsigned(lanes));
    if (fits) launch_lanes<T, kVectors>(p, lanes, aligned, stream);
    return fits;
  };
  bool const many = static_cast<std::int64_t>(p.rows) * p.cols >= kManyValues;
  if (many && by(std::integral_constant<int, kManyVectors>{})) return;
  if (by(std::integral_constant<int, kFewVectors>{})) return;
  int const blocks = (p.cols + p.group - 1) / p.group, warps = std::min(kBlockThreads / 32, blocks);
  launch_spread(kDoing, by_warp<T>, grid_of(p, blocks, warps), warps * 32, stream, p);
}

}  // namespace

void launch(Problem const& problem, DType x, int device, Stream stream) {
  DeviceGuard const guard(device);
  switch (x) {
    case DType::kFloat16:
      return launch_typed<__half>(problem, stream);
    case DType::kBFloat16:
      return launch_typed<__nv_bfloat16>(problem, stream);
    default:
      return launch_typed<float>(problem, stream);
  }
}

}  // namespace epiloq::ops::quantize_blockwise_int8
