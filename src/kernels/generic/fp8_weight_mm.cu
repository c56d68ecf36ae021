// FP8 (e4m3) weights in rows as checkpoints store them, times 16-bit activations.
//
// The decode kernel multiplies up to 64 tokens with mma.sync m16n8k16: weight rows are its rows, tokens its columns.
// K may be permuted alike in both operands, so that a lane's A fragments are 16 neighbouring columns, one 16-byte load
// of codes, and its B fragments the same 16 columns of a token. A code's bits move to the fields of a 16-bit float,
// exactly, subnormals included; NaN, which becomes 480, is detected separately. Each K step of 64 columns is
// promoted with its block's scale, or all of K with the row's at the end. The warps of a CTA split K and reduce in
// shared memory.

#include <algorithm>
#include <type_traits>

#include "core/ceil_div.h"
#include "core/cuda_check.h"
#include "epiloq/device.h"
#include "kernels/common/device_code.cuh"
#include "kernels/common/w4a16/convert.cuh"
#include "problems/fp8_weight_mm.h"

namespace epiloq::ops::fp8_weight_mm {
namespace {

using weight_only_mm::Word;

// SM75's tensor cores have no bfloat16; no such kernel is launched there.
template <class T>
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr bool kHasMma = std::is_same_v<T, __half>;
#else
constexpr bool kHasMma = true;
#endif

constexpr int kWarpsOfSm = 16;                   // resident, as registers allow
constexpr int kPanelRows = 16, kTileTokens = 8;  // of an mma instruction

// Four codes of a row as pairs of columns 0 and 2, and 1 and 3, in T: `kUnit` times as small as they are, for float16.
template <class T>
struct Codes;

template <>
struct Codes<__half> {
  static constexpr float kUnit = 256;  // exponents are biased by 15 rather than 7
  static __device__ __forceinline__ void convert(Word codes, Word& even, Word& odd) {
    constexpr Word kMagnitude = 0x3f803f80, kSign = 0x80008000;
    even = weight_only_mm::masked_or(codes << 7, kMagnitude, codes << 8 & kSign);
    odd = weight_only_mm::masked_or(codes >> 1, kMagnitude, codes & kSign);
  }
};

template <>
struct Codes<__nv_bfloat16> {
  static constexpr float kUnit = 1;
  static __device__ __forceinline__ Word times_2_to_120(Word a) {
    Word result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(0x7b807b80u), "r"(0x80008000u));
    return result;
  }
  static __device__ __forceinline__ void convert(Word codes, Word& even, Word& odd) {
    constexpr Word kMagnitude = 0x07f007f0, kSign = 0x80008000;
    even = times_2_to_120(weight_only_mm::masked_or(codes << 4, kMagnitude, codes << 8 & kSign));
    odd = times_2_to_120(weight_only_mm::masked_or(codes >> 4, kMagnitude, codes & kSign));
  }
};

__device__ __forceinline__ Word word_of(uint4 const& words, int i) {
  return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// Read again at each use: kept over the main loop it would cost a register.
__device__ __forceinline__ int thread_index() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Offset of a row's scales. In 32 bits, as a 64-bit division is a function call.
__device__ __forceinline__ int scales_of(Weight const& w, int row) {
  return static_cast<int>(static_cast<unsigned>(row) / static_cast<unsigned>(w.block_rows)) *
         static_cast<int>(w.scale_columns);
}

__device__ __forceinline__ uint4 load_codes(std::uint8_t const* from) {
  uint4 words;
  asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(from));
  return words;
}

// Volatile, so that it is not hoisted above the loads of codes, which would cost registers.
__device__ __forceinline__ uint4 load_tokens(uint4 const* from) {
  uint4 words;
  asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(from));
  return words;
}

// kPanels panels of 16 rows by kTiles tiles of 8 tokens; kGrouped: scales along K.
template <class T, int kTiles, int kPanels, bool kGrouped>
struct Decode {
  static constexpr int kTokens = kTileTokens * kTiles, kRows = kPanelRows * kPanels;
  static constexpr Word kNanFlag = 0x80808080;
  static constexpr int kHalves = 2 * kPanels;                   // a lane's rows: g and g + 8 of each panel
  static constexpr int kAhead = kTiles == 4 ? 3 : 4 / kPanels;  // K steps whose codes are in flight
  static constexpr int kLoad = sizeof(uint4) / sizeof(T), kTokenLoads = kDepth / kLoad;  // of a token's K step
  using Sums = float[kPanels][kTiles][4];
  using Step = uint4[kHalves];

  Problem const& p;
  // This lane's columns of the K step that comes next. Rows and tokens past the last one read it again.
  std::uint8_t const* codes[kHalves];
  int x[kTiles];             // in loads of 16 bytes
  int scale[kHalves];        // where a row's begin
  int block, left_of_block;  // of that step, and K steps
  Word nan_flags = 0;        // kNanFlag >> i if row i of the lane has a NaN

  __device__ __forceinline__ Decode(Problem const& p_, int first_row, int first_token, int first_step) : p(p_) {
    Weight const& w = p.weight;
    int const g = threadIdx.x % 32 / 4, column = first_step * kDepth + threadIdx.x % 4 * kLaneColumns;
    block = kGrouped ? first_step / steps_of_block() : 0;
    left_of_block = (block + 1) * steps_of_block() - first_step;
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
      int const row = min(first_row + g + 8 * i, static_cast<int>(w.n) - 1);
      codes[i] = w.q + row * w.stride + column;
      if constexpr (kGrouped) scale[i] = scales_of(w, row);
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      int const token = min(first_token + i * kTileTokens + g, static_cast<int>(p.m) - 1);
      x[i] = (token * static_cast<int>(p.stride_x / kLoad) + column / kLoad);
    }
  }

  __device__ __forceinline__ int steps_of_block() const { return static_cast<int>(p.weight.block_columns) / kDepth; }

  // Of a K step `ahead` of the next one.
  __device__ __forceinline__ void load(Step& step, int ahead) const {
#pragma unroll
    for (int i = 0; i < kHalves; ++i) step[i] = load_codes(codes[i] + ahead * kDepth);
  }

  __device__ __forceinline__ void advance(int steps) {
#pragma unroll
    for (int i = 0; i < kHalves; ++i) codes[i] += steps * kDepth;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) x[i] += steps * kTokenLoads;
  }

  // Adds the products of a K step, without its scales. Lanes past K are not `is_valid` and multiply zeros.
  __device__ __forceinline__ void multiply(Sums& sums, Step const& step, int ahead, bool is_valid) {
    uint4 some[kTiles];
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      Word b[kTiles][2];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        if (word % 2 == 0)
          some[tile] = is_valid
                           ? load_tokens(static_cast<uint4 const*>(p.x) + (x[tile] + ahead * kTokenLoads + word / 2))
                           : uint4{};
        // Columns 0 and 2, and 1 and 3.
        Word const low = word_of(some[tile], word % 2 * 2), high = word_of(some[tile], word % 2 * 2 + 1);
        b[tile][0] = __byte_perm(low, high, 0x5410);
        b[tile][1] = __byte_perm(low, high, 0x7632);
      }
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        Word a[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          Codes<T>::convert(word_of(step[2 * panel + half], word), a[half], a[half + 2]);
        }
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          float (&sum)[4] = sums[panel][tile];
          if constexpr (kHasMma<T>) weight_only_mm::mma<T>(sum, a, b[tile][0], b[tile][1], sum);
        }
      }
    }
  }

  // A byte's low seven bits are all ones in NaN alone.
  __device__ __forceinline__ void detect_nan(Step const& step) {
    auto const incremented = [](Word codes) { return (codes & 0x7f7f7f7f) + 0x01010101; };
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
      Word const found =
          incremented(step[i].x) | incremented(step[i].y) | incremented(step[i].z) | incremented(step[i].w);
      nan_flags |= (found & kNanFlag) >> i;
    }
  }

  __device__ __forceinline__ void add(Sums& sums, Step const& step, int ahead, bool is_valid = true) {
    detect_nan(step);
    if constexpr (!kGrouped) return multiply(sums, step, ahead, is_valid);
    Sums products = {};
    multiply(products, step, ahead, is_valid);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      float const of_block = __ldg(p.weight.scale + (scale[half] + block));
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        int const element = half % 2 * 2 + i % 2;
        float& sum = sums[half / 2][i / 2][element];
        sum = fmaf(of_block, products[half / 2][i / 2][element], sum);
      }
    }
    if (--left_of_block == 0) ++block, left_of_block = steps_of_block();
  }

  // Adds `steps` whole K steps.
  __device__ __forceinline__ void sum_up(Sums& sums, int steps) {
    Step ahead[kAhead] = {};
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i < steps) load(ahead[i], i);
    }
    // Branches between steps keep ptxas from loading the tokens of several first, for which there are no registers.
#pragma unroll 1
    for (; steps > 0; steps -= kAhead) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (i >= steps) break;
        add(sums, ahead[i], i);
        if (i + kAhead < steps) load(ahead[i], i + kAhead);
      }
      advance(kAhead);
    }
    advance(steps);
  }

  // Adds the partial K step at the end of K, if any.
  __device__ __forceinline__ void add_part(Sums& sums) {
    if (p.weight.k % kDepth == 0) return;
    Step rest = {};
    bool const is_valid = threadIdx.x % 4 * kLaneColumns < static_cast<int>(p.weight.k % kDepth);
    if (is_valid) load(rest, 0);
    add(sums, rest, 0, is_valid);
  }

  // Writes this warp's sums to shared memory, [token][row]; NaN for a row with a NaN among its codes.
  __device__ __forceinline__ void write_sums(float* to, Sums const& sums) const {
    int const g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    Word found = nan_flags | __shfl_xor_sync(~0u, nan_flags, 1);
    found |= __shfl_xor_sync(~0u, found, 2);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      bool const is_number = (found & kNanFlag >> half) == 0;
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        int const row = 8 * half + g, token = i / 2 * kTileTokens + 2 * t + i % 2;
        float const sum = sums[half / 2][i / 2][half % 2 * 2 + i % 2];
        to[token * kRows + row] = is_number ? sum : __int_as_float(0x7fffffff);
      }
    }
  }
};

template <class D>
__host__ __device__ constexpr int row_tiles_of(std::int64_t rows) {
  return static_cast<int>((rows + D::kRows - 1) / D::kRows);
}

// A CTA multiplies kPanels panels of rows at a time. Its warps have the codes of the next K steps in flight.
template <class T, int kTiles, int kPanels, bool kGrouped>
__global__ __launch_bounds__(32 * kWarpsOfSm, 1) void decode_fp8_kernel(__grid_constant__ Problem const p) {
  using D = Decode<T, kTiles, kPanels, kGrouped>;
  extern __shared__ float partial[];  // [warp][token][row]
  pdl_trigger();
  pdl_wait();
#pragma unroll 1
  for (int row_tile = blockIdx.x; row_tile < row_tiles_of<D>(p.weight.n); row_tile += gridDim.x) {
    int const warps = blockDim.x / 32, steps = static_cast<int>(p.weight.k / kDepth);
    {
      // Neighbouring steps, so that a warp reads whole lines.
      int const warp = thread_index() / 32, warp_steps = (steps + warps - 1) / warps,
                begin = warp_uniform(min(warp * warp_steps, steps));
      D decode(p, row_tile * D::kRows, blockIdx.y * D::kTokens, begin);
      typename D::Sums sums = {};
      decode.sum_up(sums, min(warp_steps, steps - begin));
      if (thread_index() / 32 == warps - 1) decode.add_part(sums);
      decode.write_sums(partial + thread_index() / 32 * D::kTokens * D::kRows, sums);
    }
    __syncthreads();
    for (int i = thread_index(); i < D::kTokens * D::kRows; i += blockDim.x) {
      int const token = blockIdx.y * D::kTokens + i / D::kRows, row = row_tile * D::kRows + i % D::kRows;
      if (token >= p.m || row >= p.weight.n) continue;
      float sum = 0;
      for (int warp = 0; warp < warps; ++warp) sum += partial[warp * D::kTokens * D::kRows + i];
      sum *= Codes<T>::kUnit;
      float const bias = p.bias != nullptr ? static_cast<float>(static_cast<T const*>(p.bias)[row]) : 0.f;
      float const scale = kGrouped ? 1.f : p.weight.scale[scales_of(p.weight, row)];
      static_cast<T*>(p.out)[token * p.stride_out + row] = static_cast<T>(fmaf(sum, scale, bias));
    }
    __syncthreads();  // the sums have been read
  }
}

// Warps of a CTA, which split K, and CTAs along the row tiles.
struct Shape {
  int warps, ctas;
};

// One row tile per CTA with the most warps with which all CTAs are resident. If even the fewest do not fit, the CTAs
// are persistent and take row tiles in equal numbers, which avoids a partial last wave. `token_tiles`: CTAs along
// tokens.
Shape shape_of(int row_tiles, int token_tiles, int sms) {
  for (int warps : {kWarpsOfSm, kWarpsOfSm / 2, kWarpsOfSm / 4}) {
    if (row_tiles * token_tiles <= kWarpsOfSm / warps * sms) return {warps, row_tiles};
  }
  int const warps = kWarpsOfSm / 2, at_once = std::max(1, kWarpsOfSm / warps * sms / token_tiles);
  return {warps, static_cast<int>(ceil_div(row_tiles, ceil_div(row_tiles, at_once)))};
}

template <class T, int kTiles, int kPanels, bool kGrouped>
void launch_shaped(Problem const& p, Shape shape, Stream stream) {
  using D = Decode<T, kTiles, kPanels, kGrouped>;
  dim3 const grid(shape.ctas, static_cast<unsigned>(ceil_div(p.m, D::kTokens)));
  std::size_t const bytes = sizeof(float) * shape.warps * D::kTokens * D::kRows;
  cuda_check(launch_pdl(&decode_fp8_kernel<T, kTiles, kPanels, kGrouped>, grid, 32 * shape.warps, bytes, stream, p),
             "launching epiloq.fp8_weight_mm");
}

template <class T, int kTiles, int kPanels>
void launch_tiled(Problem const& p, int device, Stream stream) {
  int const row_tiles = row_tiles_of<Decode<T, kTiles, kPanels, false>>(p.weight.n);
  int const token_tiles = static_cast<int>(ceil_div(p.m, kTileTokens * kTiles));
  Shape const shape = shape_of(row_tiles, token_tiles, device_properties(device).sm_count);
  if (p.weight.block_columns < p.weight.k) return launch_shaped<T, kTiles, kPanels, true>(p, shape, stream);
  launch_shaped<T, kTiles, kPanels, false>(p, shape, stream);
}

template <class T>
void launch_typed(Problem const& p, int device, Stream stream) {
  if (p.m <= kTileTokens) return launch_tiled<T, 1, 1>(p, device, stream);
  if (p.m <= 2 * kTileTokens) return launch_tiled<T, 2, 2>(p, device, stream);
  launch_tiled<T, 4, 1>(p, device, stream);
}

constexpr int kThreads = 256, kRun = 8;  // codes per thread

template <class T>
__global__ __launch_bounds__(kThreads) void dequantize_fp8_kernel(__grid_constant__ DequantizeProblem const p) {
  pdl_trigger();
  pdl_wait();
  Weight const& w = p.weight;
  std::int64_t const runs = (w.k + kRun - 1) / kRun, run = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (run >= p.rows * runs) return;
  std::int64_t const row = run / runs, first = run % runs * kRun, of_weight = p.first_row + row;
  std::uint8_t const* const from = w.q + of_weight * w.stride + first;
  float const* const scales = w.scale + of_weight / w.block_rows * w.scale_columns;
  T* const to = static_cast<T*>(p.out) + row * w.k + first;
  bool const is_whole = first + kRun <= w.k;
  __align__(8) std::uint8_t codes[kRun] = {};
  if (is_whole && reinterpret_cast<std::uintptr_t>(from) % 8 == 0) {
    *reinterpret_cast<uint2*>(codes) = __ldg(reinterpret_cast<uint2 const*>(from));
  } else {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      if (first + i < w.k) codes[i] = from[i];
    }
  }
  std::int64_t block = first / w.block_columns, left = (block + 1) * w.block_columns - first;
  float scale = scales[block];
  __align__(16) T values[kRun];
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    if (left-- == 0 && first + i < w.k) scale = scales[++block], left = w.block_columns - 1;
    __half const code(__nv_cvt_fp8_to_halfraw(codes[i], __NV_E4M3));
    values[i] = static_cast<T>(__half2float(code) * scale);
  }
  if (is_whole && reinterpret_cast<std::uintptr_t>(to) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(values) / 16); ++i) {
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<uint4 const*>(values)[i];
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    if (first + i < w.k) to[i] = values[i];
  }
}

template <class T>
void launch_dequantize_typed(DequantizeProblem const& p, Stream stream) {
  std::int64_t const runs = p.rows * ((p.weight.k + kRun - 1) / kRun);
  auto const blocks = static_cast<unsigned>((runs + kThreads - 1) / kThreads);
  cuda_check(launch_pdl(&dequantize_fp8_kernel<T>, blocks, kThreads, 0, stream, p), "launching epiloq.dequantize_fp8");
}

}  // namespace

void launch(Problem const& problem, DType x, int device, Stream stream) {
  DeviceGuard const guard(device);
  if (x == DType::kFloat16) return launch_typed<__half>(problem, device, stream);
  launch_typed<__nv_bfloat16>(problem, device, stream);
}

void launch_dequantize(DequantizeProblem const& problem, int device, Stream stream) {
  DeviceGuard const guard(device);
  switch (problem.dtype) {
    case DType::kFloat16:
      return launch_dequantize_typed<__half>(problem, stream);
    case DType::kBFloat16:
      return launch_dequantize_typed<__nv_bfloat16>(problem, stream);
    default:
      return launch_dequantize_typed<float>(problem, stream);
  }
}

}  // namespace epiloq::ops::fp8_weight_mm
