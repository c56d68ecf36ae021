#pragma once

// GEMM of online_quant_mm (W4A8/W8A8) with mma.sync: int8 products of quantisation blocks along K that each have a
// scale and an offset, dequantised and accumulated in FP32 registers inside the main loop. Stages are filled and
// multiplied by sm75/online_quant_mainloop.cuh and sm80/online_quant_mainloop.cuh.
//
// A CTA owns a tile of D. Its groups of warps split K: each has its own pipeline of K steps of 128, and at the end
// their sums are reduced in shared memory in a fixed order. At small M a K group is one warp and needs no barrier;
// at large M there is one K group.
//
// Integers become floats for free: an int32 sum starts at the bits of 1.5 * 2^23 instead of 0, and as its magnitude
// stays below 2^22 its bits are then those of the float 1.5 * 2^23 + sum. fma(., s, -1.5 * 2^23 s) yields s * sum with
// one rounding, exactly if s has 22 bits: A's scales are rounded to that.
//
// 4-bit weights stay 4 bits in shared memory. A nibble in the upper half of a byte is an int8 of 16 times its value,
// and the 1/16 goes into A's scales.

#include "core/cuda_check.h"
#include "kernels/common/device_code.cuh"
#include "kernels/common/online_quant_epilogue.cuh"
#include "kernels/common/online_quant_layout.h"
#include "kernels/common/ptx/cp_async.cuh"
#include "kernels/common/ptx/ldmatrix.cuh"
#include "kernels/common/tile_config.h"
#include "problems/online_quant_gemm.h"

namespace epiloq::gemm {

constexpr int kFloatBits = 0x4b400000;  // of 1.5 * 2^23
constexpr float kFloatOf = 12582912.f;

// The nearest float with 22 bits (Veltkamp's splitting).
__device__ __forceinline__ float round_to_22_bits(float x) {
  float const c = __fmul_rn(5.f, x);
  return __fsub_rn(c, __fsub_rn(c, x));
}

// Integers rather than a WarpTileConfig: nvcc 13.0 cannot name a structural value in the stub of a __global__
// template.
template <class Mainloop, int kWarpM, int kWarpN, int kWarpsM, int kWarpsN, int kKGroups_, int kStages_, int kGroup,
          int kBits>
struct OnlineQuantKernel {
  static constexpr int kStep = kOnlineQuantStep;
  static constexpr int kKGroups = kKGroups_, kStages = kStages_;
  static constexpr int kTileM = kWarpM * kWarpsM, kTileN = kWarpN * kWarpsN;
  static constexpr int kKGroupThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kThreads = kKGroups * kKGroupThreads;
  static constexpr int kMinBlocks = kThreads <= 128 ? 2 : 1;
  static constexpr int kGroups = kStep / kGroup;  // quantisation blocks per stage
  static constexpr int kDepth = kGroup / 32;      // products along K per block
  static constexpr int kRows = kWarpM / 16, kColumns = kWarpN / 8;
  static constexpr int kKinds = kParameterKinds;

  using A = OnlineQuantOperand<kKGroupThreads, kTileM, kStep, kGroups>;
  using B = OnlineQuantOperand<kKGroupThreads, kTileN, kStep * kBits / 8, kGroups>;

  // A stage: A's values, B's values, A's parameters, B's parameters.
  static constexpr int kB = A::kValueBytes;
  static constexpr int kParametersA = kB + B::kValueBytes;
  static constexpr int kParametersB = kParametersA + A::kParameterBytes;
  static constexpr int kStageBytes = kParametersB + B::kParameterBytes;
  static constexpr int kSharedBytes =
      WarpTileConfig{kWarpM, kWarpN, kWarpsM, kWarpsN, kKGroups, kStages}.shared_bytes(kGroup, kBits);

  using Epilogue = OnlineQuantEpilogue<kTileM, kTileN, kKGroups, kThreads, 8>;
  static_assert(kKGroups * kStages * kStageBytes <= kSharedBytes && Epilogue::kSharedBytes <= kSharedBytes);

  using Sums = float[kRows][kColumns][4];

  static __device__ void sync_k_group(int k_group) {
    if constexpr (kKGroups == 1) {
      __syncthreads();
    } else if constexpr (kKGroupThreads == 32) {
      __syncwarp();
    } else {
      asm volatile("bar.sync %0, %1;" ::"r"(k_group + 1), "n"(kKGroupThreads) : "memory");
    }
  }

  struct Fragment {
    unsigned x[2];
  };

  // 16 columns, for every product along the block's K.
  static __device__ void load_b(Fragment (&b)[kDepth][2], unsigned values, int first_column, int block, int lane) {
    if constexpr (kBits == 8) {
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        unsigned r[4];
        auto const [column, chunk] = ldmatrix_row_b(lane, block * kDepth + d);
        ldmatrix_x4(r, values + B::swizzled_offset(first_column + column, chunk));
        b[d][0] = {r[0], r[1]};
        b[d][1] = {r[2], r[3]};
      }
    } else {
      // The 16 bytes of 32 values are one row of a matrix: low halves are the first 16 values, high halves the others.
      // A quantisation block of 32 uses half of what is read.
      constexpr unsigned kHigh = 0xf0f0f0f0u;
#pragma unroll
      for (int d = 0; d < kDepth; d += 2) {
        unsigned r[4];
        auto const [column, chunk] = ldmatrix_row_b4(lane, block * kDepth + d, kDepth == 1);
        ldmatrix_x4(r, values + B::swizzled_offset(first_column + column, chunk));
#pragma unroll
        for (int c = 0; c < 2; ++c) {
#pragma unroll
          for (int i = 0; i < (kDepth == 1 ? 1 : 2); ++i) {
            b[d + i][c] = {r[2 * c + i] << 4 & kHigh, r[2 * c + i] & kHigh};
          }
        }
      }
    }
  }

  struct RowParameters {
    float scale, shift, offset;
  };

  // A row's parameters. scale * (1.5 * 2^23 + sum) + shift = scale * sum.
  static __device__ RowParameters row_parameters(float const* parameters, int block, int row) {
    float const* const of_block = parameters + A::parameters_of(block, 0) + row;
    float const scale = round_to_22_bits(of_block[0]) * (kBits == 4 ? 0.0625f : 1.f);
    return {scale, -kFloatOf * scale, of_block[kTileM]};
  }

  // One quantisation block: products, then scale_a (scale_b sum) + offset_a total_b added to the sums.
  static __device__ void multiply(Sums& sums, unsigned stage, float const* parameters_a, float const* parameters_b,
                                  int block, int first_row, int first_column, int lane) {
    unsigned a[kDepth][kRows][4];
    RowParameters of_row[kRows][2];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        auto const [row, chunk] = ldmatrix_row_a(lane, block * kDepth + d);
        ldmatrix_x4(a[d][r], stage + A::swizzled_offset(first_row + 16 * r + row, chunk));
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        of_row[r][h] = row_parameters(parameters_a, block, first_row + 16 * r + 8 * h + lane / 4);
      }
    }
    float const* const of_block = parameters_b + B::parameters_of(block, 0) + first_column + 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < kColumns; j += 2) {
      Fragment b[kDepth][2];
      load_b(b, stage + kB, first_column + 8 * j, block, lane);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        auto const scale_b = *reinterpret_cast<float2 const*>(of_block + 8 * (j + c));
        auto const total_b = *reinterpret_cast<float2 const*>(of_block + 8 * (j + c) + kTileN);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          int product[4] = {kFloatBits, kFloatBits, kFloatBits, kFloatBits};
#pragma unroll
          for (int d = 0; d < kDepth; ++d) Mainloop::multiply(product, a[d][r], b[d][c].x);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            RowParameters const& row = of_row[r][i / 2];
            float& sum = sums[r][j + c][i];
            float const scaled = fmaf(__int_as_float(product[i]), row.scale, row.shift);
            sum = fmaf(scaled, i % 2 == 0 ? scale_b.x : scale_b.y, sum);
            sum = fmaf(row.offset, i % 2 == 0 ? total_b.x : total_b.y, sum);
          }
        }
      }
    }
  }

  // Weights with offsets: adds scale_a sum(q_a) offset_b to the sums.
  static __device__ void add_offsets(Sums& sums, float const* parameters_a, float const* parameters_b, int block,
                                     int first_row, int first_column, int lane) {
    float const* const rows = parameters_a + A::parameters_of(block, 2) + first_row + lane / 4;
    float const* const columns = parameters_b + B::parameters_of(block, 2) + first_column + 2 * (lane % 4);
    float sum_a[kRows][2];
#pragma unroll
    for (int r = 0; r < 2 * kRows; ++r) sum_a[r / 2][r % 2] = rows[8 * r];
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      auto const offset = *reinterpret_cast<float2 const*>(columns + 8 * j);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sums[r][j][i] = fmaf(sum_a[r][i / 2], i % 2 == 0 ? offset.x : offset.y, sums[r][j][i]);
        }
      }
    }
  }

  // A thread's K group, tile, and the K steps of its group.
  struct Work {
    OnlineQuantGemmProblem const& p;
    int k_group, thread, first_m, first_n, steps;

    __device__ A a() const { return {p.a, p.k, first_m, p.m, p.a_parameters, kKinds, p.kinds, p.padded_m}; }
    __device__ B b() const {
      return {p.b, p.k / 8 * kBits, first_n, p.n, p.b_parameters, p.kinds, p.kinds, p.padded_n};
    }
    __device__ int step(int i) const { return k_group + i * kKGroups; }
  };

  static __device__ void run(OnlineQuantGemmProblem const& p, unsigned char* shared) {
    int const k_group = threadIdx.x / kKGroupThreads, thread = threadIdx.x % kKGroupThreads, lane = threadIdx.x % 32;
    int const first_m = blockIdx.x * kTileM, first_n = blockIdx.y * kTileN;
    unsigned char* const stages = shared + k_group * kStages * kStageBytes;
    int const steps = (p.k / kStep - k_group + kKGroups - 1) / kKGroups;
    typename Mainloop::template Pipeline<OnlineQuantKernel> pipeline({p, k_group, thread, first_m, first_n, steps},
                                                                     stages);

    int const warp = thread / 32, first_row = warp / kWarpsN * kWarpM, first_column = warp % kWarpsN * kWarpN;
    Sums sums = {};
    for (int i = 0; i < steps; ++i) {
      int const stage = pipeline.begin(i);
      auto const* const parameters_a = reinterpret_cast<float const*>(stages + stage + kParametersA);
      auto const* const parameters_b = reinterpret_cast<float const*>(stages + stage + kParametersB);
#pragma unroll 1
      for (int block = 0; block < kGroups; ++block) {
        multiply(sums, pipeline.stages + stage, parameters_a, parameters_b, block, first_row, first_column, lane);
        if (p.kinds == kKinds) add_offsets(sums, parameters_a, parameters_b, block, first_row, first_column, lane);
      }
      pipeline.end();
    }
    __syncthreads();
    auto* const all_sums = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          Epilogue::write(all_sums, k_group, first_row + 16 * r + 8 * h + lane / 4,
                          first_column + 8 * j + 2 * (lane % 4), {sums[r][j][2 * h], sums[r][j][2 * h + 1]});
        }
      }
    }
    __syncthreads();
    Epilogue::store(p, all_sums, first_m, first_n);
  }
};

template <class K>
__global__ __launch_bounds__(K::kThreads,
                             K::kMinBlocks) void online_quant_kernel(__grid_constant__ OnlineQuantGemmProblem const p) {
  extern __shared__ __align__(128) unsigned char shared[];
  pdl_trigger();
  K::run(p, shared);
}

template <class Mainloop, WarpTileConfig kConfig, int kGroup, int kBits>
struct OnlineQuantGemm {
  using K = OnlineQuantKernel<Mainloop, kConfig.warp_m, kConfig.warp_n, kConfig.warps_m, kConfig.warps_n,
                              kConfig.k_groups, kConfig.stages, kGroup, kBits>;

  static void launch(OnlineQuantGemmProblem const& p, int device, Stream stream) {
    auto* const kernel = online_quant_kernel<K>;
    static PerDevice prepared;
    prepared.allow_shared(kernel, K::kSharedBytes, device);
    dim3 const grid((p.m + K::kTileM - 1) / K::kTileM, (p.n + K::kTileN - 1) / K::kTileN);
    cuda_check(launch_pdl(kernel, grid, K::kThreads, K::kSharedBytes, stream, p), "launching epiloq.online_quant_mm");
  }
};

}  // namespace epiloq::gemm
