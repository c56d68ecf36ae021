#pragma once

// How sums come to the block that finishes a piece, of which a lane sends four at a time: its barrier counts each part.

#include "kernels/common/ptx/cluster.cuh"
#include "kernels/common/ptx/shared_memory.cuh"
#include "kernels/common/w4a16/split_k.h"

namespace epiloq::ops::weight_only_mm {

__device__ __forceinline__ float4 operator+(float4 const& a, float4 const& b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

struct PieceShare : Pieces {
  static constexpr int kPartBytes = 16, kPieceBytes = 32 * kPartBytes;
  SharedAddress barrier, lane_slot;  // the lane's part of the first slot

  __device__ __forceinline__ PieceShare(int rank_, int split_, SharedAddress barrier_, SharedAddress slots)
      : Pieces{rank_, split_}, barrier(barrier_), lane_slot(slots + threadIdx.x % 32 * kPartBytes) {}

  // By one thread, before the block says that it has begun.
  __device__ __forceinline__ void expect(int pieces) const {
    expect_sent(barrier, own_of(pieces) * (split - 1) * kPieceBytes);
  }
  __device__ __forceinline__ void send_part(Piece const& piece, float4 const& part) const {
    send(address_in_block(part_at(piece, distance_to(piece)), piece.owner), part,
         address_in_block(barrier, piece.owner));
  }
  __device__ __forceinline__ float4 received(Piece const& piece, int distance) const {
    return gemm::load_shared_four(part_at(piece, distance));
  }

 private:
  __device__ __forceinline__ SharedAddress part_at(Piece const& piece, int distance) const {
    return lane_slot + slot_of(piece, distance, split) * kPieceBytes;
  }
};

}  // namespace epiloq::ops::weight_only_mm
