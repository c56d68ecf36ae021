// Dequantises a packed weight (packed_layout.h) to a row-major matrix, in runs of 8 columns. 8-bit output types receive
// the integers q - zero, for GEMMs that apply the scales in their epilogue.
//
// A warp converts one packed tile at a time. Lanes exchange words so that each holds whole runs and the four lanes of a
// row hold adjacent ones: a store then writes whole 32-byte sectors.

#include <cuda_fp8.h>

#include <bit>

#include "core/cuda_check.h"
#include "epiloq/device.h"
#include "kernels/common/device_code.cuh"
#include "kernels/common/w4a16/dequantize_tiles.cuh"
#include "problems/narrow_codes.h"
#include "problems/packed_layout.h"
#include "problems/weight_only.h"

namespace epiloq::ops::weight_only_mm {
namespace {

constexpr int kRun = 8;
template <bool kWholeRuns>
constexpr int kCtasPerSm = kWholeRuns ? 6 : 1;  // six keep enough loads and stores in flight

// A lane's 2 runs of 8 columns: of rows g and g + 8 (8 bits), or 32 columns apart, of both rows (fewer bits). Word i
// has columns 2 i and 2 i + 1 of the first run in its bytes 0 and 1, of the second in its bytes 2 and 3. Values of
// fewer than 8 bits have 4 here, those of row g in a byte's lower half.
using Words = std::uint32_t[4];

template <int kBits>
__device__ __forceinline__ void load_tile(Words& words, std::uint8_t const* lane_of_tile) {
  std::uint32_t lane[lane_bytes(kBits) / 4];
  auto const* const from = reinterpret_cast<std::uint32_t const*>(lane_of_tile);
  if constexpr (sizeof(lane) == sizeof(uint4)) {
    *reinterpret_cast<uint4*>(words) = __ldg(reinterpret_cast<uint4 const*>(from));
  } else {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(lane) / 4); ++i) lane[i] = __ldg(from + i);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      std::uint32_t block[narrow::block_words(kBits)];
      narrow::take_block<kBits>(block, lane, i / 2);
      words[i] = narrow::widened<kBits>(block, i % 2);
    }
  }
}

// Permutes the fragments of packed_layout.h into runs.
template <int kBits>
__device__ __forceinline__ void arrange(Words& words) {
  if constexpr (kBits < 8) {
    // Of 16 columns, two runs, a word has those of the first in its bytes 0 and 2.
    constexpr std::uint32_t kFirstRuns = 0x6420, kSecondRuns = 0x7531;
    Words const w = {words[0], words[1], words[2], words[3]};
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = __byte_perm(w[i / 2], w[i / 2 + 2], i % 2 == 0 ? kFirstRuns : kSecondRuns);
  }
  transpose_fours(words);
}

// The values of rows g and g + 8, which are adjacent in memory (parameter_of).
__device__ __forceinline__ float2 pair_at(void const* values, DType dtype, std::int64_t pair) {
  if (dtype == DType::kFloat16) return __half22float2(static_cast<__half2 const*>(values)[pair]);
  if (dtype == DType::kBFloat16) return __bfloat1622float2(static_cast<__nv_bfloat162 const*>(values)[pair]);
  return static_cast<float2 const*>(values)[pair];
}

// Parameters of one row and scale group. With floating-point offsets the zero point is 0.
struct Affine {
  float scale, zero, offset;
};

// Parameters of rows g and g + 8.
struct Parameters {
  float2 scale, zero, offset;

  __device__ __forceinline__ Affine of(int row) const {
    return row == 0 ? Affine{scale.x, zero.x, offset.x} : Affine{scale.y, zero.y, offset.y};
  }
};

struct Groups {
  std::int64_t first;  // the lane's pair of parameters in the panel's first group
  int shift;           // groups have 2^shift columns; if negative, any number

  __device__ __forceinline__ std::int64_t pair_of(Weight const& w, int column) const {
    constexpr int kPairs = kPanelRows / 2;
    return first + (shift >= 0 ? column >> shift : column / w.group) * kPairs;
  }
};

template <int kBits, class T>
__device__ __forceinline__ Parameters parameters_at(Weight const& w, Groups const& groups, int column) {
  constexpr float kMiddle = 1 << (kBits - 1);
  std::int64_t const pair = groups.pair_of(w, column);
  Parameters result{{1.f, 1.f}, {kMiddle, kMiddle}, {0.f, 0.f}};
  if (sizeof(T) > 1) result.scale = pair_at(w.scale, w.scale_dtype, pair);
  if (w.offset != nullptr) {
    result.zero = {0.f, 0.f};
    result.offset = pair_at(w.offset, w.scale_dtype, pair);
  } else if (w.zero != nullptr) {
    uchar2 const zero = reinterpret_cast<uchar2 const*>(w.zero)[pair];
    result.zero = {static_cast<float>(zero.x), static_cast<float>(zero.y)};
  }
  return result;
}

// One run of row g (`row` = 0) or g + 8 (`row` = 1).
template <int kBits>
struct Run {
  Words const& words;
  int row, run;

  __device__ __forceinline__ int half() const { return kBits == 8 ? row : run; }
  __device__ __forceinline__ std::uint32_t bytes_of(std::uint32_t word) const {
    return kBits == 8 ? word : word >> (4 * row) & 0x0f0f0f0fu;
  }
  // Column i plus 2^23: its byte is the lowest of that float.
  __device__ __forceinline__ float above_2_to_23(int i) const {
    constexpr std::uint32_t kBitsOf2To23 = 0x4b000000, kByteOf2To23 = 0x7440;
    return __uint_as_float(__byte_perm(bytes_of(words[i / 2]), kBitsOf2To23, kByteOf2To23 + 2 * half() + i % 2));
  }
  // Four columns as bytes.
  __device__ __forceinline__ std::uint32_t four(int first) const {
    constexpr std::uint32_t kLower = 0x5410, kUpper = 0x7632;
    return bytes_of(__byte_perm(words[first / 2], words[first / 2 + 1], half() == 0 ? kLower : kUpper));
  }
};

template <class T>
__device__ __forceinline__ void convert_two(T* to, float2 from) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    *reinterpret_cast<__nv_bfloat162*>(to) = __float22bfloat162_rn(from);
  } else if constexpr (std::is_same_v<T, __half>) {
    *reinterpret_cast<__half2*>(to) = __float22half2_rn(from);
  } else {
    to[0] = static_cast<T>(from.x), to[1] = static_cast<T>(from.y);
  }
}

// Converts four bytes 128 + d, where d is a difference of two 4-bit integers, to four values d.
__device__ __forceinline__ std::uint32_t without_128(std::uint32_t biased, std::int8_t) { return biased ^ 0x80808080u; }

// A byte ORed into the half 1024 is 1024 plus the byte.
__device__ __forceinline__ std::uint32_t without_128(std::uint32_t biased, __nv_fp8_e4m3) {
  std::uint32_t bytes = 0;
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    std::uint32_t const of_1024 = __byte_perm(biased, 0x64646464u, pair == 0 ? 0x4140 : 0x4342);
    __half2 const differences = __hsub2(reinterpret_cast<__half2 const&>(of_1024), __float2half2_rn(1024 + 128));
    bytes |= std::uint32_t{__nv_cvt_halfraw2_to_fp8x2(differences, __NV_SATFINITE, __NV_E4M3)} << (16 * pair);
  }
  return bytes;
}

// A run within one scale group.
template <int kBits, class T>
__device__ __forceinline__ void dequantize_run(T (&to)[kRun], Run<kBits> const& run, Affine const& a, bool has_offset) {
  if constexpr (sizeof(T) == 1 && kBits < 8) {
    std::uint32_t const zeros = static_cast<std::uint32_t>(a.zero) * 0x01010101u;
#pragma unroll
    for (int i = 0; i < kRun; i += 4) {  // 128 + q - zero, which does not borrow from the next byte
      reinterpret_cast<std::uint32_t*>(to)[i / 4] = without_128((run.four(i) | 0x80808080u) - zeros, T());
    }
  } else {
    float const from = 0x1p23f + a.zero;
    float2 numbers[kRun / 2];
#pragma unroll
    for (int i = 0; i < kRun / 2; ++i) {
      numbers[i] = {run.above_2_to_23(2 * i) - from, run.above_2_to_23(2 * i + 1) - from};
      if (sizeof(T) > 1) numbers[i] = {__fmul_rn(a.scale, numbers[i].x), __fmul_rn(a.scale, numbers[i].y)};
    }
    if (sizeof(T) > 1 && has_offset) {
#pragma unroll
      for (float2& two : numbers) two = {__fadd_rn(two.x, a.offset), __fadd_rn(two.y, a.offset)};
    }
#pragma unroll
    for (int i = 0; i < kRun / 2; ++i) convert_two(to + 2 * i, numbers[i]);
  }
}

// A run that crosses scale group boundaries.
template <int kBits, class T>
__device__ __forceinline__ void dequantize_columns(T (&to)[kRun], Run<kBits> const& run, Weight const& w,
                                                   Groups const& groups, int column) {
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    Affine const a = parameters_at<kBits, T>(w, groups, min(column + i, w.k - 1)).of(run.row);
    float const difference = run.above_2_to_23(i) - (0x1p23f + a.zero);
    to[i] = static_cast<T>(sizeof(T) == 1 ? difference : __fadd_rn(__fmul_rn(a.scale, difference), a.offset));
  }
}

template <int kBits, class T, bool kWholeRuns>
__device__ __forceinline__ void store_tile(Weight const& w, T* out, Words const& words, Groups const& groups,
                                           std::int64_t first_row, int first_column) {
#pragma unroll
  for (int r = 0; r < depth(kBits) / 32; ++r) {
    int const column = first_column + 32 * r;
    if (column >= w.k) break;
    Parameters const p = parameters_at<kBits, T>(w, groups, column);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      std::int64_t const n = first_row + 8 * row;
      if (n >= w.n) break;
      Run<kBits> const run{words, row, r};
      alignas(16) T values[kRun];
      if constexpr (kWholeRuns) {
        dequantize_run(values, run, p.of(row), w.offset != nullptr);
      } else {
        dequantize_columns<kBits>(values, run, w, groups, column);
      }
      store_run(w, out, n, column, values);
    }
  }
}

template <int kBits, class T, bool kWholeRuns>
__global__ __launch_bounds__(kDequantizeThreads,
                             kCtasPerSm<kWholeRuns>) void dequantize_kernel(__grid_constant__ Weight const w,
                                                                            int group_shift, T* out) {
  pdl_trigger();
  pdl_wait();
  int const tiles = w.padded_k / depth(kBits), lane = threadIdx.x % kLanes;
  std::int64_t const panel = blockIdx.x;
  Groups const groups{panel * w.groups * (kPanelRows / 2) + lane / 4, group_shift};
  for (int tile = blockIdx.y * kDequantizeWarps + threadIdx.x / kLanes; tile < tiles;
       tile += gridDim.y * kDequantizeWarps) {
    Words words;
    load_tile<kBits>(words, w.q + ((panel * tiles + tile) * kLanes + lane) * lane_bytes(kBits));
    arrange<kBits>(words);
    store_tile<kBits, T, kWholeRuns>(w, out, words, groups, panel * kPanelRows + lane / 4,
                                     tile * depth(kBits) + lane % 4 * kRun);
  }
}

// See Groups.
int shift_of(Weight const& w) {
  constexpr int kWholeRows = 31;  // every column is in group 0
  if (w.group >= w.k) return kWholeRows;
  return std::has_single_bit(static_cast<unsigned>(w.group)) ? std::countr_zero(static_cast<unsigned>(w.group)) : -1;
}

template <int kBits, class T>
auto kernel_of(Weight const& w) {
  return w.group % kRun == 0 ? &dequantize_kernel<kBits, T, true> : &dequantize_kernel<kBits, T, false>;
}

template <class T>
void launch_typed(DequantizeProblem const& problem, int device, Stream stream) {
  Weight const& w = problem.weight;
  struct Variant {
    int bits;
    void (*kernel)(Weight, int, T*);
  };
  Variant const variants[] = {
      {2, kernel_of<2, T>(w)}, {3, kernel_of<3, T>(w)}, {4, kernel_of<4, T>(w)}, {8, kernel_of<8, T>(w)}};
  dim3 const grid = dequantize_grid(w.n, w.padded_k / depth(w.bits), device);
  for (Variant const& variant : variants) {
    if (variant.bits != w.bits) continue;
    cuda_check(
        launch_pdl(variant.kernel, grid, kDequantizeThreads, 0, stream, w, shift_of(w), static_cast<T*>(problem.out)),
        "launching epiloq.dequantize_weight");
  }
}

}  // namespace

void launch_dequantize(DequantizeProblem const& problem, int device, Stream stream) {
  DeviceGuard const guard(device);
  switch (problem.out_dtype) {
    case DType::kFloat16:
      return launch_typed<__half>(problem, device, stream);
    case DType::kBFloat16:
      return launch_typed<__nv_bfloat16>(problem, device, stream);
    case DType::kFloat8E4M3:
      return launch_typed<__nv_fp8_e4m3>(problem, device, stream);
    case DType::kInt8:
      return launch_typed<std::int8_t>(problem, device, stream);
    default:
      return launch_typed<float>(problem, device, stream);
  }
}

}  // namespace epiloq::ops::weight_only_mm
