// Dequantises a packed weight to rows in memory: one thread per lane of a tile, in runs of 8 columns. Types of 8 bits
// receive the integers q - zero, for products that apply scales later; from at most 4 bits in runs of 16 columns, if
// rows and groups are whole runs.

#include <cuda_fp8.h>

#include "core/cuda_check.h"
#include "epiloq/device.h"
#include "kernels/common/device_code.cuh"
#include "kernels/common/w4a16/dequantize_tiles.cuh"
#include "problems/packed_layout.h"
#include "problems/weight_only.h"

namespace epiloq::ops::weight_only_mm {
namespace {

constexpr int kRun = 8;

__device__ __forceinline__ float read(void const* values, DType dtype, std::int64_t i) {
  if (dtype == DType::kFloat16) return static_cast<float>(static_cast<__half const*>(values)[i]);
  if (dtype == DType::kBFloat16) return static_cast<float>(static_cast<__nv_bfloat16 const*>(values)[i]);
  return static_cast<float const*>(values)[i];
}

struct Affine {
  float scale, zero, offset;
};

template <class T>
constexpr bool kScaled = sizeof(T) > 1;

template <int kBits, class T>
__device__ __forceinline__ Affine affine_at(Weight const& w, std::int64_t panel, int row, int k) {
  std::int64_t const i = (panel * w.groups + k / w.group) * kPanelRows + parameter_of(row);
  float const scale = kScaled<T> ? read(w.scale, w.scale_dtype, i) : 1.f;
  if (w.offset != nullptr) return {scale, 0.f, read(w.offset, w.scale_dtype, i)};
  return {scale, w.zero != nullptr ? static_cast<float>(w.zero[i]) : static_cast<float>(1 << (kBits - 1)), 0.f};
}

// Values of 2 and 3 bits are widened to 4 before the transposition.
template <int kBits>
constexpr int kHeldBits = kBits < 4 ? 4 : kBits;

template <int kBits>
__device__ __forceinline__ void hold(std::uint32_t (&words)[4], std::uint32_t const* from) {
  std::uint32_t lane[kBits < 4 ? kBits : 4];
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(lane) / 4); ++i) lane[i] = __ldcg(from + i);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kBits >= 4) {
      words[i] = lane[i];
    } else {
      std::uint32_t block[narrow::block_words(kBits)];
      narrow::take_block<kBits>(block, lane, i / 2);
      words[i] = narrow::widened<kBits>(block, i % 2);
    }
  }
}

// A lane's columns are two runs of a 64-column tile, or one of 32 columns: where the first begins; the second follows.
template <int kBits>
constexpr int kFirstRun = kBits == 8 ? kRun : 2 * kRun;

// A lane's value at row g (0) or g + 8 (1) and a column of a run.
template <int kBits>
constexpr int index_of(int row, int run, int column) {
  if (kBits == 8) return 4 * (column / 2) + 2 * row + column % 2;
  return 2 * (4 * (column / 2) + 2 * (column % 2) + run) + row;
}

template <int kBits, class T>
__device__ __forceinline__ void write_run(Weight const& w, T* out, std::uint8_t const* lane, std::int64_t panel,
                                          int row, int k, int const (&index)[kRun]) {
  std::int64_t const n = panel * kPanelRows + row;
  if (n >= w.n || k >= w.k) return;
  alignas(16) T values[kRun];
  Affine a = affine_at<kBits, T>(w, panel, row, k);
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    if (i > 0 && w.group % kRun != 0 && k + i < w.k) a = affine_at<kBits, T>(w, panel, row, k + i);
    float const difference = static_cast<float>(value_at(lane, kHeldBits<kBits>, index[i])) - a.zero;
    values[i] = static_cast<T>(kScaled<T> ? __fadd_rn(__fmul_rn(a.scale, difference), a.offset) : difference);
  }
  store_run(w, out, n, k, values);
}

template <int kBits, class T, int kRow, int kOf>
__device__ __forceinline__ void write_part(Weight const& w, T* out, std::uint8_t const* lane, std::int64_t panel, int g,
                                           int first) {
  constexpr int kIndex[kRun] = {index_of<kBits>(kRow, kOf, 0), index_of<kBits>(kRow, kOf, 1),
                                index_of<kBits>(kRow, kOf, 2), index_of<kBits>(kRow, kOf, 3),
                                index_of<kBits>(kRow, kOf, 4), index_of<kBits>(kRow, kOf, 5),
                                index_of<kBits>(kRow, kOf, 6), index_of<kBits>(kRow, kOf, 7)};
  write_run<kBits>(w, out, lane, panel, g + 8 * kRow, first + kOf * kRun, kIndex);
}

template <int kBits, class T>
__global__ __launch_bounds__(kDequantizeThreads, 4) void dequantize_kernel(__grid_constant__ Weight const w, T* out) {
  constexpr int kBytes = lane_bytes(kBits), kDepth = depth(kBits);
  pdl_trigger();
  pdl_wait();
  int const tiles = w.padded_k / kDepth, lane = threadIdx.x % kLanes;
  std::int64_t const panel = blockIdx.x;
  for (int tile = blockIdx.y * kDequantizeWarps + threadIdx.x / kLanes; tile < tiles;
       tile += gridDim.y * kDequantizeWarps) {
    std::uint32_t words[4];
    hold<kBits>(words, reinterpret_cast<std::uint32_t const*>(w.q + ((panel * tiles + tile) * kLanes + lane) * kBytes));
    transpose_fours(words);
    auto const* const bytes = reinterpret_cast<std::uint8_t const*>(words);
    int const first = tile * kDepth + lane % 4 * kFirstRun<kBits>;
    write_part<kBits, T, 0, 0>(w, out, bytes, panel, lane / 4, first);
    write_part<kBits, T, 1, 0>(w, out, bytes, panel, lane / 4, first);
    if constexpr (kDepth == 64) {
      write_part<kBits, T, 0, 1>(w, out, bytes, panel, lane / 4, first);
      write_part<kBits, T, 1, 1>(w, out, bytes, panel, lane / 4, first);
    }
  }
}

// A lane's 16 columns of a row, of which a word is four.
constexpr int kByteRun = 16;

// Integers u in the low nibbles of four bytes, of which `zeros` are subtracted: 128 + u - zero, which does not borrow
// from the next byte.
__device__ __forceinline__ std::uint32_t biased_differences(std::uint32_t nibbles, std::uint32_t zeros) {
  return (nibbles & 0x0f0f0f0fu | 0x80808080u) - zeros;
}

__device__ __forceinline__ std::uint32_t numbers_of(std::uint32_t biased, std::int8_t) { return biased ^ 0x80808080u; }

// A byte ORed into the half 1024 is 1024 plus the byte.
__device__ __forceinline__ std::uint32_t numbers_of(std::uint32_t biased, __nv_fp8_e4m3) {
  std::uint32_t numbers = 0;
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    std::uint32_t const of_1024 = __byte_perm(biased, 0x64646464u, pair == 0 ? 0x4140 : 0x4342);
    __half2 const differences = __hsub2(reinterpret_cast<__half2 const&>(of_1024), __float2half2_rn(1024 + 128));
    numbers |= std::uint32_t{__nv_cvt_halfraw2_to_fp8x2(differences, __NV_SATFINITE, __NV_E4M3)} << (16 * pair);
  }
  return numbers;
}

template <int kBits, class T>
__global__ __launch_bounds__(kDequantizeThreads, 8) void integers_kernel(__grid_constant__ Weight const w, T* out) {
  constexpr int kBytes = lane_bytes(kBits), kDepth = depth(kBits);
  pdl_trigger();
  pdl_wait();
  int const tiles = w.padded_k / kDepth, lane = threadIdx.x % kLanes, g = lane / 4;
  std::int64_t const panel = blockIdx.x;
  for (int tile = blockIdx.y * kDequantizeWarps + threadIdx.x / kLanes; tile < tiles;
       tile += gridDim.y * kDequantizeWarps) {
    std::uint32_t words[4];
    hold<kBits>(words, reinterpret_cast<std::uint32_t const*>(w.q + ((panel * tiles + tile) * kLanes + lane) * kBytes));
    transpose_fours(words);
    int const k = tile * kDepth + lane % 4 * kByteRun;
    if (k >= w.k) continue;
    uchar2 zero = {1 << (kBits - 1), 1 << (kBits - 1)};  // of rows g and g + 8
    if (w.zero != nullptr) {
      std::int64_t const i = (panel * w.groups + k / w.group) * kPanelRows + parameter_of(g);
      zero = __ldg(reinterpret_cast<uchar2 const*>(w.zero + i));
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      std::int64_t const n = panel * kPanelRows + g + 8 * row;
      std::uint32_t const zeros = (row == 0 ? zero.x : zero.y) * 0x01010101u;
      std::uint32_t numbers[4];  // of the columns 2 i, 2 i + 8, 2 i + 1 and 2 i + 9
#pragma unroll
      for (int i = 0; i < 4; ++i) numbers[i] = numbers_of(biased_differences(words[i] >> (4 * row), zeros), T());
      constexpr std::uint32_t kFirstRunOf = 0x6420, kSecondRunOf = 0x7531;  // bytes of two such words
      if (n >= w.n) continue;
      *reinterpret_cast<uint4*>(out + n * w.k + k) = {
          __byte_perm(numbers[0], numbers[1], kFirstRunOf), __byte_perm(numbers[2], numbers[3], kFirstRunOf),
          __byte_perm(numbers[0], numbers[1], kSecondRunOf), __byte_perm(numbers[2], numbers[3], kSecondRunOf)};
    }
  }
}

template <int kBits, class T>
auto kernel_of(Weight const& w) {
  if constexpr (!kScaled<T> && kBits <= 4) {
    if (w.k % kByteRun == 0 && w.group % kByteRun == 0) return integers_kernel<kBits, T>;
  }
  return dequantize_kernel<kBits, T>;
}

template <class T>
void launch_typed(DequantizeProblem const& problem, int device, Stream stream) {
  Weight const& w = problem.weight;
  struct Variant {
    int bits;
    void (*kernel)(Weight, T*);
  };
  Variant const variants[] = {
      {2, kernel_of<2, T>(w)}, {3, kernel_of<3, T>(w)}, {4, kernel_of<4, T>(w)}, {8, kernel_of<8, T>(w)}};
  dim3 const grid = dequantize_grid(w.n, w.padded_k / depth(w.bits), device);
  for (Variant const& variant : variants) {
    if (variant.bits != w.bits) continue;
    cuda_check(launch_pdl(variant.kernel, grid, kDequantizeThreads, 0, stream, w, static_cast<T*>(problem.out)),
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
