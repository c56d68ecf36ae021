// Dequantises a packed weight to rows in memory: one thread per lane of a tile, in runs of 8 columns. Types of 8 bits
// receive the integers q - zero, for products that apply scales later.

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

template <class T>
void launch_typed(DequantizeProblem const& problem, int device, Stream stream) {
  Weight const& w = problem.weight;
  struct Variant {
    int bits;
    void (*kernel)(Weight, T*);
  };
  constexpr Variant kVariants[] = {{2, dequantize_kernel<2, T>},
                                   {3, dequantize_kernel<3, T>},
                                   {4, dequantize_kernel<4, T>},
                                   {8, dequantize_kernel<8, T>}};
  dim3 const grid = dequantize_grid(w.n, w.padded_k / depth(w.bits), device);
  for (Variant const& variant : kVariants) {
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
