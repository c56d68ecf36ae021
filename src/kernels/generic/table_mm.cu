// Weights of 4-bit codes in a table of 16 numbers (NF4, FP4), in rows as bitsandbytes stores them.
//
// The decode kernel multiplies up to 32 tokens with mma.sync m16n8k16: weight rows are its rows, tokens its columns.
// K may be permuted alike in both operands, so that a lane's A fragments are eight neighbouring columns, one word of
// codes, and its B fragments the same eight columns of a token, one 16-byte load. Codes are looked up by byte
// permutation. Every 64 columns, which share a scale, sums are promoted. The warps of a CTA split K and meet in shared
// memory. Memory-bound by the codes for few tokens.

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

// The table in T by bytes: the low and the high ones of four entries each.
struct Table {
  Word low[4], high[4];
};

template <class T>
__device__ __forceinline__ Table table_of(float const* entries) {
  Table table;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    T const four[4] = {static_cast<T>(entries[4 * i]), static_cast<T>(entries[4 * i + 1]),
                       static_cast<T>(entries[4 * i + 2]), static_cast<T>(entries[4 * i + 3])};
    Word pairs[2];
    memcpy(pairs, four, sizeof pairs);
    table.low[i] = __byte_perm(pairs[0], pairs[1], 0x6420);
    table.high[i] = __byte_perm(pairs[0], pairs[1], 0x7531);
  }
  return table;
}

// A word of codes to four pairs of neighbouring columns. The earlier column is in a byte's high half.
__device__ __forceinline__ void look_up(Word (&pairs)[4], Word codes, Table const& table) {
  Word const entry = codes & 0x77777777u;                      // within eight entries
  Word const half = (codes >> 1 & 0x44444444u) | 0x32103210u;  // which eight: selects byte i of either
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    Word const entries = entry >> 16 * i, halves = half >> 16 * i;
    Word const low = __byte_perm(__byte_perm(table.low[0], table.low[1], entries),
                                 __byte_perm(table.low[2], table.low[3], entries), halves);
    Word const high = __byte_perm(__byte_perm(table.high[0], table.high[1], entries),
                                  __byte_perm(table.high[2], table.high[3], entries), halves);
    pairs[2 * i] = __byte_perm(low, high, 0x4051);
    pairs[2 * i + 1] = __byte_perm(low, high, 0x6273);
  }
}

__device__ __forceinline__ uint2 load_codes(std::uint8_t const* from) {
  uint2 words;
  asm volatile("ld.global.nc.L1::no_allocate.v2.b32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "l"(from));
  return words;
}

// A lane's codes and scales of one K step: rows g and g + 8 of each panel.
template <int kPanels>
struct Step {
  uint2 codes[kPanels][2];
  float scale[kPanels][2];
};

template <class T, int kPanels, int kTiles>
struct Decode {
  static constexpr int kRows = kPanelRows * kPanels, kTokens = kTileTokens * kTiles;
  using Sums = float[kPanels][kTiles][4];

  Problem const& p;
  int g, t;
  std::int64_t row_bytes, row_scales;
  int steps_of_block;

  __device__ Decode(Problem const& p_)
      : p(p_),
        g(threadIdx.x % 32 / 4),
        t(threadIdx.x % 4),
        row_bytes(p_.weight.k / 2),
        row_scales(p_.weight.k / p_.weight.block_size),
        steps_of_block(static_cast<int>(p_.weight.block_size / kDepth)) {}

  __device__ __forceinline__ void load(Step<kPanels>& step, std::int64_t const (&rows)[kPanels][2], int at) const {
#pragma unroll
    for (int i = 0; i < 2 * kPanels; ++i) {
      std::int64_t const row = rows[i / 2][i % 2];
      step.codes[i / 2][i % 2] = load_codes(p.weight.codes + row * row_bytes + at * kStepBytes + t * kLaneBytes);
      step.scale[i / 2][i % 2] = __ldg(p.weight.scale + row * row_scales + at / steps_of_block);
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

  __device__ __forceinline__ void multiply(Sums& sums, Step<kPanels> const& step, uint4 const (&x)[kTiles][2],
                                           Table const& table) const {
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      float products[kTiles][4] = {};
#pragma unroll
      for (int word = 0; word < 2; ++word) {
        auto const codes_of = [&](int row) { return word == 0 ? step.codes[panel][row].x : step.codes[panel][row].y; };
        Word upper[4], lower[4];  // rows g and g + 8
        look_up(upper, codes_of(0), table);
        look_up(lower, codes_of(1), table);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          Word const a[4] = {upper[2 * half], lower[2 * half], upper[2 * half + 1], lower[2 * half + 1]};
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
        sums[panel][i / 4][i % 4] =
            fmaf(step.scale[panel][i % 4 / 2], products[i / 4][i % 4], sums[panel][i / 4][i % 4]);
      }
    }
  }

  // Sums of this warp to [token][row].
  __device__ __forceinline__ void put(float* to, Sums const& sums) const {
#pragma unroll
    for (int i = 0; i < 4 * kPanels * kTiles; ++i) {
      int const panel = i / (4 * kTiles), tile = i / 4 % kTiles, row = panel * kPanelRows + i % 4 / 2 * 8 + g;
      to[(tile * kTileTokens + 2 * t + i % 2) * kRows + row] = sums[panel][tile][i % 4];
    }
  }
};

template <class T, int kPanels, int kTiles>
__global__ __launch_bounds__(kThreads) void decode_table_kernel(__grid_constant__ Problem const p) {
  using D = Decode<T, kPanels, kTiles>;
  __shared__ float partial[kWarps][D::kTokens * D::kRows];
  pdl_trigger();
  pdl_wait();
  D const decode(p);
  std::int64_t const first_row = std::int64_t{blockIdx.x} * D::kRows;
  int const first_token = blockIdx.y * D::kTokens, warp = threadIdx.x / 32;
  Table const table = table_of<T>(p.weight.table);
  std::int64_t rows[kPanels][2];  // those past the last row read it again
#pragma unroll
  for (int i = 0; i < 2 * kPanels; ++i) rows[i / 2][i % 2] = min(first_row + i * 8 + decode.g, p.weight.n - 1);

  // Neighbouring steps, so that a warp reads whole lines.
  int const steps = static_cast<int>(p.weight.k / kDepth), share = (steps + kWarps - 1) / kWarps;
  int const end = min(steps, (warp + 1) * share);
  typename D::Sums sums = {};
  Step<kPanels> next{};
  if (warp * share < end) decode.load(next, rows, warp * share);
#pragma unroll 2
  for (int at = warp * share; at < end; ++at) {
    Step<kPanels> const step = next;
    uint4 x[kTiles][2];
    decode.load_tokens(x, first_token, at);
    if (at + 1 < end) decode.load(next, rows, at + 1);
    decode.multiply(sums, step, x, table);
  }
  decode.put(partial[warp], sums);
  __syncthreads();
  for (int i = threadIdx.x; i < D::kTokens * D::kRows; i += kThreads) {
    std::int64_t const token = first_token + i / D::kRows, row = first_row + i % D::kRows;
    if (token >= p.m || row >= p.weight.n) continue;
    float sum = p.bias != nullptr ? static_cast<float>(static_cast<T const*>(p.bias)[row]) : 0.f;
#pragma unroll
    for (int of = 0; of < kWarps; ++of) sum += partial[of][i];
    static_cast<T*>(p.out)[token * p.stride_out + row] = static_cast<T>(sum);
  }
}

template <class T, int kPanels, int kTiles>
void launch_decode(Problem const& p, Stream stream) {
  using D = Decode<T, kPanels, kTiles>;
  dim3 const grid(static_cast<unsigned>((p.weight.n + D::kRows - 1) / D::kRows),
                  static_cast<unsigned>((p.m + D::kTokens - 1) / D::kTokens));
  cuda_check(launch_pdl(&decode_table_kernel<T, kPanels, kTiles>, grid, kThreads, 0, stream, p),
             "launching epiloq.table_mm");
}

// More rows for few tokens, whose loads they share.
template <class T>
void launch_typed(Problem const& p, Stream stream) {
  if (p.m <= kTileTokens) return launch_decode<T, 2, 1>(p, stream);
  if (p.m <= 2 * kTileTokens) return launch_decode<T, 2, 2>(p, stream);
  launch_decode<T, 1, 4>(p, stream);
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
  if (x == DType::kFloat16) return launch_typed<__half>(problem, stream);
  launch_typed<__nv_bfloat16>(problem, stream);
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
