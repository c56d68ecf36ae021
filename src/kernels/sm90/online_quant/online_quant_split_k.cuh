#pragma once

// Split-K epilogue of the online_quant_mm GEMM: a tile whose K the CTAs of a cluster split, their last one. Subtiles
// (split_k.h) are its 8-token groups.

#include "kernels/common/device_code.cuh"
#include "kernels/common/ptx/cluster.cuh"
#include "kernels/common/ptx/shared_memory.cuh"
#include "kernels/common/split_k.h"
#include "kernels/sm90/online_quant/online_quant_tile.cuh"

namespace epiloq::gemm {

// A lane has four sums of eight tokens, a vector that goes to the same lane of the same warp. Code that runs once is
// dominated by instruction fetch, so only what must name its registers is unrolled.
template <class T>
class OnlineQuantSm90SplitK {
 public:
  using Sums = float[T::kTokens / 2];

  // Called by one thread before its CTA arrives at the cluster barrier.
  static __device__ void expect(typename T::Shared const& shared) {
    init_dsmem_barrier(shared.received, subtiles().own_of(T::kTokenGroups) * (split() - 1) * T::kVectors);
  }

  // `warp`: of the warps of all rows.
  __device__ OnlineQuantSm90SplitK(OnlineQuantGemmProblem const& p, typename T::Shared const& shared, int warp,
                                   int lane)
      : p_(p),
        received_(shared.received),
        slots_(shared.weights + (warp * 32 + lane) * 16),
        row_(warp * 16 + lane / 4),
        token_(lane % 4 * 2) {}

  // The stages are free once all CTAs have arrived: they were written by TMA and read by wgmma, both of which have been
  // waited for, so relaxed arrival suffices.
  __device__ __forceinline__ void store(Sums const& sums, typename T::TileOrigin const& origin) const {
    cluster_arrive();
    cluster_wait();
    distribute(sums);
    wait_dsmem_barrier(received_);
    switch (p_.dtype) {
      case DType::kFloat16:
        return store_own<__half>(origin);
      case DType::kBFloat16:
        return store_own<__nv_bfloat16>(origin);
      default:
        return store_own<float>(origin);
    }
  }

 private:
  static __device__ __forceinline__ int split() { return gridDim.y; }
  static __device__ __forceinline__ int rank() { return blockIdx.y; }

  static __device__ __forceinline__ SubtileOwnership subtiles() { return {rank(), split()}; }

  // The slot of an own token group for the CTA `distance` ranks after this one.
  __device__ __forceinline__ SharedAddress slot(int ordinal, int distance) const {
    return slots_ + (ordinal * split() + distance) * T::kVectors;
  }

  __device__ __forceinline__ void distribute(Sums const& sums) const {
    Subtile subtile{0, 0};
#pragma unroll
    for (int token_group = 0; token_group < T::kTokenGroups; ++token_group) {
      float const* const of = sums + 4 * token_group;
      float4 const four{of[0], of[1], of[2], of[3]};
      int const distance = subtiles().distance_to(subtile);
      SharedAddress const to = slot(subtile.ordinal, distance);
      if (distance == 0) {
        store_shared_four(to, four);
      } else {
        st_async(dsmem_address(to, subtile.owner), four, dsmem_address(received_, subtile.owner));
      }
      subtile = subtile.next(split());
    }
  }

  template <class Out>
  __device__ __forceinline__ void store_own(typename T::TileOrigin const& origin) const {
    int const n = origin.first_n + row_;
    auto const* const bias = static_cast<Out const*>(p_.bias);
    auto const bias_of = [&](int row) { return bias != nullptr && row < p_.n ? static_cast<float>(bias[row]) : 0.f; };
    float const biases[2] = {bias_of(n), bias_of(n + 8)};
    int ordinal = 0;
#pragma unroll 1
    for (int token_group = rank(); token_group < T::kTokenGroups; token_group += split(), ++ordinal) {
      float sums[4] = {};
#pragma unroll 1
      for (int distance = 0; distance < split(); ++distance) {
        std::uint32_t bits[4];
        load_shared(bits, slot(ordinal, distance));
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] += __uint_as_float(bits[i]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int const token = origin.first_m + token_group * 8 + token_ + i % 2, row = n + i / 2 * 8;
        if (token >= p_.m || row >= p_.n) continue;
        float const sum = clamped(sums[i] + biases[i / 2], p_.lo, p_.hi);
        static_cast<Out*>(p_.out)[token * p_.stride_out + row] = static_cast<Out>(sum);
      }
    }
  }

  OnlineQuantGemmProblem const& p_;
  SharedAddress received_, slots_;
  int row_, token_;  // the lane's first
};

}  // namespace epiloq::gemm
