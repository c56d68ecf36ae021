#pragma once

// How sums come to the block that finishes a piece, of which a lane sends four at a time: its barrier counts each part.

#include "core/cluster.cuh"
#include "ops/weight_only_mm/pieces.h"

namespace epiloq::ops::weight_only_mm {

__device__ __forceinline__ float4 operator+(float4 const& a, float4 const& b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

// Volatile, as what says that the values are there is, and does not tell the compiler that it guards memory.
__device__ __forceinline__ float4 load_four(SharedAddress from) {
  float4 four;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
               : "r"(from));
  return four;
}
__device__ __forceinline__ void store_four(SharedAddress to, float4 const& four) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(four.x), "f"(four.y), "f"(four.z), "f"(four.w)
               : "memory");
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
    return load_four(part_at(piece, distance));
  }

 private:
  __device__ __forceinline__ SharedAddress part_at(Piece const& piece, int distance) const {
    return lane_slot + slot(piece, distance) * kPieceBytes;
  }
};

}  // namespace epiloq::ops::weight_only_mm
