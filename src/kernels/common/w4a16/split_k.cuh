#pragma once

// Split-K reduction through DSMEM: lanes send four partial sums at a time to the CTA that owns a subtile, whose barrier
// counts the bytes.

#include "kernels/common/ptx/cluster.cuh"
#include "kernels/common/ptx/shared_memory.cuh"
#include "kernels/common/w4a16/split_k.h"

namespace epiloq::ops::weight_only_mm {

__device__ __forceinline__ float4 operator+(float4 const& a, float4 const& b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

struct SubtileReduction : SubtileOwnership {
  static constexpr int kPartBytes = 16, kSubtileBytes = 32 * kPartBytes;
  SharedAddress barrier, lane_slot;  // the lane's part of the first slot

  __device__ __forceinline__ SubtileReduction(int rank_, int split_, SharedAddress barrier_, SharedAddress slots)
      : SubtileOwnership{rank_, split_}, barrier(barrier_), lane_slot(slots + threadIdx.x % 32 * kPartBytes) {}

  // Called by one thread before its CTA arrives at the cluster barrier.
  __device__ __forceinline__ void expect(int subtiles) const {
    init_dsmem_barrier(barrier, own_of(subtiles) * (split - 1) * kSubtileBytes);
  }
  __device__ __forceinline__ void send_partial(Subtile const& subtile, float4 const& part) const {
    st_async(dsmem_address(part_at(subtile, distance_to(subtile)), subtile.owner), part,
             dsmem_address(barrier, subtile.owner));
  }
  __device__ __forceinline__ float4 received(Subtile const& subtile, int distance) const {
    return gemm::load_shared_four(part_at(subtile, distance));
  }

 private:
  __device__ __forceinline__ SharedAddress part_at(Subtile const& subtile, int distance) const {
    return lane_slot + receive_slot(subtile, distance, split) * kSubtileBytes;
  }
};

}  // namespace epiloq::ops::weight_only_mm
