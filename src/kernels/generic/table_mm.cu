// Weights of 4-bit codes in a table of 16 numbers (NF4, FP4), in rows as bitsandbytes stores them.
//
// The decode kernel multiplies up to 64 tokens with mma.sync m16n8k16: weight rows are its rows, tokens its columns.
// K may be permuted alike in both operands, so that a lane's A fragments are eight neighbouring columns, one word of
// codes, and its B fragments the same eight columns of a token, one 16-byte load. A byte of codes is looked up in
// shared memory as a pair of columns; each lane has its own copy of the 256 pairs in its own bank. Every 64 columns,
// which share a scale, sums are promoted. The warps of a CTA split K and reduce in shared memory.

#include <type_traits>

#include "core/cuda_check.h"
#include "epiloq/device.h"
#include "kernels/common/device_code.cuh"
#include "kernels/common/w4a16/convert.cuh"
#include "problems/table_mm.h"

namespace epiloq::ops::table_mm {
namespace {

using weight_only_mm::Word;

// SM75's tensor cores have no bfloat16; no such kernel is launched there.
template <class T>
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr bool kHasMma = std::is_same_v<T, __half>;
#else
constexpr bool kHasMma = true;
#endif

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kPanelRows = 16, kTileTokens = 8;  // of an mma instruction
constexpr int kStepBytes = kDepth / 2;           // of a row's codes
constexpr int kLaneBytes = kStepBytes / 4;       // two words: four lanes share a row

// For each byte of codes and each lane, the values of its two columns in T. The earlier column is in a byte's high
// half.
using Pairs = Word[256][32];

template <class T>
__device__ __forceinline__ void fill(Pairs& pairs, float const* table) {
  float const entry = __ldg(table + threadIdx.x % 16);
#pragma unroll 4
  for (int i = 0; i < 256 / kWarps; ++i) {
    int const byte = threadIdx.x / 32 * (256 / kWarps) + i;
    T const both[2] = {static_cast<T>(__shfl_sync(~0u, entry, byte >> 4)),
                       static_cast<T>(__shfl_sync(~0u, entry, byte & 15))};
    Word word;
    memcpy(&word, both, sizeof word);
    pairs[byte][threadIdx.x % 32] = word;
  }
}

__device__ __forceinline__ uint2 load_codes(std::uint8_t const* from) {
  uint2 words;
  asm volatile("ld.global.nc.L1::no_allocate.v2.b32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "l"(from));
  return words;
}

// A lane's codes and scales of one K step: rows g and g + 8.
struct Step {
  uint2 codes[2];
  float scale[2];
};

template <class T, int kTiles>
struct Decode {
  static constexpr int kTokens = kTileTokens * kTiles;
  static constexpr int kStepsAtOnce = 8 / kTiles;  // whose codes a warp loads together, as registers allow
  using Sums = float[kTiles][4];

  Problem const& p;
  int g, t;
  std::uint8_t const* codes[2];  // this lane's, of rows g and g + 8; rows past the last one read it again
  float const* scale[2];
  int steps_of_block;

  __device__ Decode(Problem const& p_, std::int64_t first_row)
      : p(p_),
        g(threadIdx.x % 32 / 4),
        t(threadIdx.x % 4),
        steps_of_block(static_cast<int>(p_.weight.block_size / kDepth)) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      std::int64_t const row = min(first_row + g + 8 * i, p.weight.n - 1);
      codes[i] = p.weight.codes + row * (p.weight.k / 2) + t * kLaneBytes;
      scale[i] = p.weight.scale + row * (p.weight.k / p.weight.block_size);
    }
  }

  __device__ __forceinline__ void load(Step& step, int at) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      step.codes[i] = load_codes(codes[i] + at * kStepBytes);
      step.scale[i] = __ldg(scale[i] + at / steps_of_block);
    }
  }

  // Token g of each tile, the columns of this lane's two words; zero past the last token.
  __device__ __forceinline__ void load_tokens(uint4 (&x)[kTiles][2], int first_token, int at) const {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      int const token = first_token + tile * kTileTokens + g;
      auto const* const from =
          reinterpret_cast<uint4 const*>(static_cast<T const*>(p.x) + token * p.stride_x + at * kDepth + t * 16);
#pragma unroll
      for (int i = 0; i < 2; ++i) x[tile][i] = token < p.m ? __ldg(from + i) : uint4{};
    }
  }

  __device__ __forceinline__ void multiply(Sums& sums, Step const& step, uint4 const (&x)[kTiles][2],
                                           Word const (*pairs)[32]) const {
    float products[kTiles][4] = {};
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      Word values[2][4];  // rows g and g + 8, by pairs of columns
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        Word const codes = word == 0 ? step.codes[i / 4].x : step.codes[i / 4].y;
        values[i / 4][i % 4] = pairs[codes >> 8 * (i % 4) & 255][threadIdx.x % 32];
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Word const a[4] = {values[0][2 * half], values[1][2 * half], values[0][2 * half + 1], values[1][2 * half + 1]};
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          uint4 const& of = x[tile][word];
          Word const b[2] = {half == 0 ? of.x : of.z, half == 0 ? of.y : of.w};
          if constexpr (kHasMma<T>) weight_only_mm::mma<T>(products[tile], a, b[0], b[1], products[tile]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) {
      sums[i / 4][i % 4] = fmaf(step.scale[i % 4 / 2], products[i / 4][i % 4], sums[i / 4][i % 4]);
    }
  }

  // Writes this warp's sums to shared memory, [token][row].
  __device__ __forceinline__ void write_sums(float* to, Sums const& sums) const {
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) {
      int const row = i % 4 / 2 * 8 + g, token = i / 4 * kTileTokens + 2 * t + i % 2;
      to[token * kPanelRows + row] = sums[i / 4][i % 4];
    }
  }
};

// A CTA multiplies 16 rows at a time. Its warps load several K steps before they multiply, to keep enough bytes in
// flight.
template <class T, int kTiles>
__global__ __launch_bounds__(kThreads, 2) void decode_table_kernel(__grid_constant__ Problem const p) {
  using D = Decode<T, kTiles>;
  __shared__ Pairs pairs;
  __shared__ float partial[kWarps][D::kTokens * kPanelRows];
  pdl_trigger();
  pdl_wait();
  fill<T>(pairs, p.weight.table);
  __syncthreads();
  int const first_token = blockIdx.y * D::kTokens, warp = threadIdx.x / 32;
  // Neighbouring steps, so that a warp reads whole lines.
  int const steps = static_cast<int>(p.weight.k / kDepth), warp_steps = (steps + kWarps - 1) / kWarps;
  int const end = min(steps, (warp + 1) * warp_steps);
#pragma unroll 1
  for (std::int64_t first_row = std::int64_t{blockIdx.x} * kPanelRows; first_row < p.weight.n;
       first_row += std::int64_t{gridDim.x} * kPanelRows) {
    D const decode(p, first_row);
    typename D::Sums sums = {};
#pragma unroll 1
    for (int at = warp * warp_steps; at < end; at += D::kStepsAtOnce) {
      Step some[D::kStepsAtOnce];
#pragma unroll
      for (int i = 0; i < D::kStepsAtOnce; ++i) {
        if (at + i < end) decode.load(some[i], at + i);
      }
#pragma unroll
      for (int i = 0; i < D::kStepsAtOnce; ++i) {
        if (at + i >= end) break;
        uint4 x[kTiles][2];
        decode.load_tokens(x, first_token, at + i);
        decode.multiply(sums, some[i], x, pairs);
      }
    }
    decode.write_sums(partial[warp], sums);
    __syncthreads();
    for (int i = threadIdx.x; i < D::kTokens * kPanelRows; i += kThreads) {
      std::int64_t const token = first_token + i / kPanelRows, row = first_row + i % kPanelRows;
      if (token >= p.m || row >= p.weight.n) continue;
      float sum = p.bias != nullptr ? static_cast<float>(static_cast<T const*>(p.bias)[row]) : 0.f;
#pragma unroll
      for (int of = 0; of < kWarps; ++of) sum += partial[of][i];
      static_cast<T*>(p.out)[token * p.stride_out + row] = static_cast<T>(sum);
    }
    __syncthreads();  // the sums have been read
  }
}

// As many CTAs as run at a time, so that each fills its pairs once.
template <class T, int kTiles>
void launch_decode(Problem const& p, int device, Stream stream) {
  using D = Decode<T, kTiles>;
  constexpr int kResident = 2;
  std::int64_t const panels = (p.weight.n + kPanelRows - 1) / kPanelRows;
  std::int64_t const at_once = std::int64_t{kResident} * device_properties(device).sm_count;
  std::int64_t const waves = (panels + at_once - 1) / at_once;
  dim3 const grid(static_cast<unsigned>((panels + waves - 1) / waves),
                  static_cast<unsigned>((p.m + D::kTokens - 1) / D::kTokens));
  cuda_check(launch_pdl(&decode_table_kernel<T, kTiles>, grid, kThreads, 0, stream, p), "launching epiloq.table_mm");
}

template <class T>
void launch_typed(Problem const& p, int device, Stream stream) {
  if (p.m <= kTileTokens) return launch_decode<T, 1>(p, device, stream);
  if (p.m <= 2 * kTileTokens) return launch_decode<T, 2>(p, device, stream);
  launch_decode<T, 4>(p, device, stream);
}

constexpr int kRun = 8;  // codes per thread: a word

template <class T>
__global__ __launch_bounds__(kThreads) void dequantize_table_kernel(__grid_constant__ Weight const w, T* out) {
  __shared__ float table[16];
  pdl_trigger();
  pdl_wait();
  if (threadIdx.x < 16) table[threadIdx.x] = w.table[threadIdx.x];
  __syncthreads();
  std::int64_t const count = w.n * w.k, first = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * kRun;
  if (first >= count) return;
  bool const is_whole = first + kRun <= count;
  Word codes = 0;
  if (is_whole && reinterpret_cast<std::uintptr_t>(w.codes) % 4 == 0) {
    codes = __ldg(reinterpret_cast<Word const*>(w.codes + first / 2));
  } else {
    for (int i = 0; i < kRun / 2 && first + 2 * i < count; ++i) codes |= Word{w.codes[first / 2 + i]} << 8 * i;
  }
  alignas(16) T values[kRun];
  std::int64_t block = first / w.block_size, left = (block + 1) * w.block_size - first;
  float scale = w.scale[block];
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    if (left-- == 0 && first + i < count) scale = w.scale[++block], left = w.block_size - 1;
    values[i] = static_cast<T>(table[codes >> (i ^ 1) * 4 & 15] * scale);
  }
  if (is_whole && reinterpret_cast<std::uintptr_t>(out) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(values) / 16); ++i) {
      reinterpret_cast<uint4*>(out + first)[i] = reinterpret_cast<uint4 const*>(values)[i];
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    if (first + i < count) out[first + i] = values[i];
  }
}

template <class T>
void launch_dequantize_typed(Weight const& w, void* out, Stream stream) {
  std::int64_t const per_block = std::int64_t{kThreads} * kRun;
  auto const blocks = static_cast<unsigned>((w.n * w.k + per_block - 1) / per_block);
  cuda_check(launch_pdl(&dequantize_table_kernel<T>, blocks, kThreads, 0, stream, w, static_cast<T*>(out)),
             "launching epiloq.dequantize_table");
}

}  // namespace

void launch(Problem const& problem, DType x, int device, Stream stream) {
  DeviceGuard const guard(device);
  if (x == DType::kFloat16) return launch_typed<__half>(problem, device, stream);
  launch_typed<__nv_bfloat16>(problem, device, stream);
}

void launch_dequantize(Weight const& weight, void* out, DType dtype, int device, Stream stream) {
  DeviceGuard const guard(device);
  switch (dtype) {
    case DType::kFloat16:
      return launch_dequantize_typed<__half>(weight, out, stream);
    case DType::kBFloat16:
      return launch_dequantize_typed<__nv_bfloat16>(weight, out, stream);
    default:
      return launch_dequantize_typed<float>(weight, out, stream);
  }
}

}  // namespace epiloq::ops::table_mm
