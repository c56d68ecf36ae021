#pragma once

// How sums come to the block that finishes a piece, of which a lane sends four at a time: its barrier counts each part.

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

  // By one thread, before the block says that it has begun.
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
