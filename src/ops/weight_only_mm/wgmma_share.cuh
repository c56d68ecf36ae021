#pragma once

// SM90: a tile's K shared by the blocks of a cluster, which may have ways along K too, so that many warps have sums of
// the same rows. What is left to do they share by eights of tokens, of which a lane has four sums: first a block's
// ways, in the ring, which a block with a single tile no longer needs; then the blocks.

#include "ops/weight_only_mm/piece_share.cuh"
#include "ops/weight_only_mm/tile_start.cuh"
#include "ops/weight_only_mm/wgmma_math.cuh"

namespace epiloq::ops::weight_only_mm {

template <class C>
class ClusterEnd {
 public:
  using Math = WgmmaMath<C>;
  using Sums = float[Math::kSums];
  using Place = typename C::Place;

  static __device__ __forceinline__ PieceShare share_of(TileParams const& params, SharedAddress received,
                                                        SharedAddress stages) {
    return {static_cast<int>(blockIdx.y), static_cast<int>(gridDim.y), received, stages + params.exchange_at};
  }

  __device__ __forceinline__ ClusterEnd(TileParams const& params, Math const& math, SharedAddress received,
                                        SharedAddress stages)
      : share_(share_of(params, received, stages)),
        slab_(math.slab),
        way_(uniform(threadIdx.x / C::kWayThreads)),
        exchange_(stages + math.lane * PieceShare::kPartBytes),
        tokens_(params.tokens) {}

  // Pieces of a tile that blocks share: eights that have tokens, of each slab.
  static __device__ __forceinline__ int pieces_of(Place const& place, int tokens) {
    return eights_of(place, tokens) * C::kSlabs;
  }

  // Makes the sums of some of the warp's eights whole. Returns which, a bit each.
  __device__ __forceinline__ unsigned meet(Sums& sums, Place const& place) const {
    int const eights = eights_of(place, tokens_);
    meet_ways(sums, eights);
    for_pieces(eights, [&](int eight, Piece const& piece) {
      if (!share_.is_own(piece)) share_.send_part(piece, four_of(sums + eight * 4));
    });
    wait_for_sent(share_.barrier);
    unsigned whole = 0;
    for_pieces(eights, [&](int eight, Piece const& piece) {
      if (!share_.is_own(piece)) return;
      whole |= 1u << eight;
#pragma unroll 1
      for (int distance = 1; distance < share_.split; ++distance) {
        add(sums + eight * 4, share_.received(piece, distance));
      }
    });
    return whole;
  }

 private:
  static constexpr int kEights = C::kTokens / 8, kBarrier = 2;
  static_assert(C::kBlocks == 1 && kEights <= 32 && (C::kWays == 1 || kBarrier + C::kSlabs <= 16));

  static __device__ __forceinline__ int eights_of(Place const& place, int tokens) {
    return min(kEights, (tokens - place.first_token + 7) / 8);
  }

  __device__ __forceinline__ bool is_own_way(int eight) const { return eight % C::kWays == way_; }

  // Of the warp's, those that are its own among the ways.
  template <class Do>
  __device__ __forceinline__ void for_pieces(int eights, Do const& act) const {
    Piece const step = Piece::of(C::kSlabs, share_.split);
    Piece piece = Piece::of(slab_, share_.split);
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) {
      if (eight < eights && is_own_way(eight)) act(eight, piece);
      piece = piece.after(step, share_.split);
    }
  }

  static __device__ __forceinline__ float4 four_of(float const* sums) { return {sums[0], sums[1], sums[2], sums[3]}; }
  static __device__ __forceinline__ void add(float* sums, float4 const& others) {
    sums[0] += others.x;
    sums[1] += others.y;
    sums[2] += others.z;
    sums[3] += others.w;
  }

  // Of an eight's sums, those of the way that comes so many places after the eight's own.
  __device__ __forceinline__ SharedAddress exchange_place(int eight, int distance) const {
    return exchange_ + ((slab_ * kEights + eight) * (C::kWays - 1) + distance - 1) * PieceShare::kPieceBytes;
  }

  __device__ __forceinline__ void meet_ways(Sums& sums, int eights) const {
    if constexpr (C::kWays == 1) return;
    wait_for_math_warps<C>();  // have read the ring
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) {
      int const distance = (way_ + C::kWays - eight % C::kWays) % C::kWays;
      if (eight < eights && distance > 0)
        gemm::store_shared_four(exchange_place(eight, distance), four_of(sums + eight * 4));
    }
    // Those of all ways that have the same rows.
    asm volatile("bar.sync %0, %1;" ::"r"(kBarrier + slab_), "n"(32 * C::kWays) : "memory");
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) {
      if (eight >= eights || !is_own_way(eight)) continue;
#pragma unroll
      for (int distance = 1; distance < C::kWays; ++distance) {
        add(sums + eight * 4, gemm::load_shared_four(exchange_place(eight, distance)));
      }
    }
  }

  PieceShare share_;
  int slab_, way_;
  SharedAddress exchange_;
  int tokens_;
};

}  // namespace epiloq::ops::weight_only_mm
