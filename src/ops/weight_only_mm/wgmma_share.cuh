#pragma once

// SM90: a tile's K shared by the blocks of a cluster, which may have ways along K too, so that many warps have sums of
// the same rows. What is left to do they share by eights of tokens, of which a lane has four sums: first a block's
// ways, in the ring, which a block with a single tile no longer needs; then the blocks.
//
// What a block does once waits for its instructions, so that few count more than fast ones: each of a warp's eights has
// its own copy of what needs to name its registers, and nothing else has.

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
      : p_(params.p),
        share_(share_of(params, received, stages)),
        slab_(math.slab),
        way_(uniform(threadIdx.x / C::kWayThreads)),
        places_(stages + math.lane * PieceShare::kPartBytes + slab_ * kEights * kPlaces * PieceShare::kPieceBytes) {}

  // Pieces of a tile that blocks share: eights that have tokens, of each slab.
  static __device__ __forceinline__ int pieces_of(Place const& place, int tokens) {
    return eights_of(place, tokens) * C::kSlabs;
  }

  // Stores of the tile what the warp finishes.
  __device__ __forceinline__ void store(Sums const& sums, Place const& place) const {
    int const eights = eights_of(place, p_.m);
    Piece const first = Piece::of(first_piece(slab_, way_, eights, C::kWays), share_.split);
    float4 own[kOwn];
    meet_ways(own, sums);
    distribute(own, eights, first);
    wait_for_sent(share_.barrier);
    store_own(own, eights, first, place);
  }

 private:
  static constexpr int kEights = C::kTokens / 8, kOwn = kEights / C::kWays, kBarrier = 2;
  // Until others have come a warp's own sums stay in registers where they are few, unless six warpgroups leave none,
  // and where there is one way, which has no place in the ring; else they wait there.
  static constexpr bool kInRegisters = C::kWays == 1 || (kOwn <= 2 && C::kMathTeams < 6);
  static constexpr int kPlaces = C::kWays > 1 ? C::kWays - 1 : 1;  // in the ring, of an eight
  static_assert(C::kBlocks == 1 && kEights % C::kWays == 0 && (C::kWays == 1 || kBarrier + C::kSlabs <= 16));

  static __device__ __forceinline__ int eights_of(Place const& place, int tokens) {
    return min(kEights, (tokens - place.first_token + 7) / 8);
  }

  // Of the way that comes so many before the eight's own. The first such place has that one's own sums later.
  __device__ __forceinline__ SharedAddress place_of(int eight, int distance) const {
    return places_ + (eight * kPlaces + distance - 1) * PieceShare::kPieceBytes;
  }

  // Of the n-th eight of a way.
  static __device__ __forceinline__ float4 part_of(Sums const& sums, int n, int way) {
    float4 part;
#pragma unroll
    for (int other = 0; other < C::kWays; ++other) {
      float const* const of = sums + (n * C::kWays + other) * 4;
      if (other == 0 || other == way) part = {of[0], of[1], of[2], of[3]};
    }
    return part;
  }

  // The warp's own eights, of all ways.
  __device__ __forceinline__ void meet_ways(float4 (&own)[kOwn], Sums const& sums) const {
    if constexpr (C::kWays > 1) wait_for_math_warps<C>();  // have read the ring
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      own[n] = part_of(sums, n, way_);
#pragma unroll
      for (int distance = 1; distance < C::kWays; ++distance) {
        int const way = (way_ + distance) % C::kWays;
        gemm::store_shared_four(place_of(n * C::kWays + way, distance), part_of(sums, n, way));
      }
    }
    if constexpr (C::kWays == 1) return;
    // Those of all ways that have the same rows.
    asm volatile("bar.sync %0, %1;" ::"r"(kBarrier + slab_), "n"(32 * C::kWays) : "memory");
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
#pragma unroll
      for (int distance = 1; distance < C::kWays; ++distance) {
        own[n] = own[n] + gemm::load_shared_four(place_of(n * C::kWays + way_, distance));
      }
    }
  }

  // To the blocks that finish them.
  __device__ __forceinline__ void distribute(float4 const (&own)[kOwn], int eights, Piece piece) const {
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      int const eight = n * C::kWays + way_;
      if (eight >= eights) return;
      if (share_.is_own(piece)) {
        if constexpr (!kInRegisters) gemm::store_shared_four(place_of(eight, 1), own[n]);
      } else {
        share_.send_part(piece, own[n]);
      }
      piece = piece.next(share_.split);
    }
  }

  __device__ __forceinline__ void store_own(float4 const (&own)[kOwn], int eights, Piece piece,
                                            Place const& place) const {
    DirectRows<typename C::T> const rows(p_, (place.first_slab + slab_) * kSlab);
    constexpr int kCopies = kInRegisters ? kOwn : 1;
#pragma unroll kCopies
    for (int n = 0; n < kOwn; ++n, piece = piece.next(share_.split)) {
      int const eight = n * C::kWays + way_;
      if (eight >= eights || !share_.is_own(piece)) continue;
      float4 sum;
      if constexpr (kInRegisters) {
        sum = own[n];
      } else {
        sum = gemm::load_shared_four(place_of(eight, 1));
      }
#pragma unroll 1
      for (int distance = 1; distance < share_.split; ++distance) sum = sum + share_.received(piece, distance);
      float const four[] = {sum.x, sum.y, sum.z, sum.w};
      rows.store(place.first_token + eight * 8, four, Math::F::kUnit);
    }
  }

  Problem const& p_;
  PieceShare share_;
  int slab_, way_;
  SharedAddress places_;
};

}  // namespace epiloq::ops::weight_only_mm
