#pragma once

// Split-K of the groupwise GEMM between the two CTAs of a cluster, reduced through DSMEM: for all tiles if there are
// too few for all SMs, or for those of a partial last wave. Either the second CTA computes fewer K steps and sends all
// its sums (kOneSidedSplitK), or each computes half of K and finishes half of the tile's rows.

#include <cute/arch/cluster_sm90.hpp>

#include "kernels/common/ptx/cluster.cuh"
#include "kernels/common/ptx/shared_memory.cuh"
#include "kernels/common/ptx/tma.cuh"
#include "kernels/sm90/groupwise_tile.cuh"

namespace epiloq::gemm {

// The K steps of a tile that a CTA computes, in order.
struct KSteps {
  int first, depth;

  __device__ int at(int i, GroupwiseTile const& tile) const { return first + (tile.is_reversed ? depth - 1 - i : i); }
};

// The K range of a CTA. If all tiles are split it is known from the start and built by whole warps; warp_uniform, as
// everything that branches around products depend on, to keep addresses in uniform registers. If only the last tile is
// split, it is computed when that comes, as the main loop leaves no registers for it.
template <class C>
class KRange {
 public:
  __device__ explicit KRange(GroupwiseParams const& params)
      : params_(params), kept_(C::kSplitsLastWave ? KSteps{} : of_rank(warp_uniform(rank_in(params)))) {}

  __device__ KSteps of(GroupwiseTile const& tile) const {
    if (!C::kSplitsLastWave) return kept_;
    return tile.is_split ? of_rank(rank_in(params_)) : KSteps{0, all()};
  }
  // Called by whole warps; warp_uniform.
  __device__ int depth(GroupwiseTile const& tile) const {
    return C::kSplitsLastWave ? warp_uniform(of(tile).depth) : kept_.depth;
  }
  __device__ bool is_split(GroupwiseTile const& tile) const {
    return C::kSplitsLastWave ? warp_uniform(tile.is_split) : params_.p.split_k > 1;
  }
  // If all tiles are split or none is; otherwise unused.
  __device__ int first_of_all() const { return kept_.first; }
  static __device__ int rank_in(GroupwiseParams const& params) {
    return params.p.split_k == 1 ? 0 : static_cast<int>(cute::block_rank_in_cluster());
  }

 private:
  __device__ int all() const { return (params_.p.k + kGroupDepth - 1) / kGroupDepth; }
  __device__ KSteps of_rank(int rank) const {
    int const first = rank * params_.steps_of_first;
    return {first, min(params_.steps_of_first, all() - first)};
  }

  GroupwiseParams const& params_;
  KSteps kept_;
};

// Sums as bits.
__device__ __forceinline__ std::uint32_t bits_of(std::uint32_t sum) { return sum; }
__device__ __forceinline__ std::uint32_t bits_of(float sum) { return __float_as_uint(sum); }
__device__ __forceinline__ void add_bits(std::uint32_t& sum, std::uint32_t bits) { sum += bits; }
__device__ __forceinline__ void add_bits(float& sum, std::uint32_t bits) { sum += __uint_as_float(bits); }

// All tiles split: a warp whose rows the other CTA finishes sends its sums to the staging slots of the warp with the
// same rows there and, if they do not fit, to those of a warp whose rows this CTA finishes.
template <class C>
class RowExchange {
 public:
  using Sum = typename C::Sum;

  // `warp`: of the warps of all rows.
  __device__ RowExchange(typename C::Shared const& shared, int warp, int lane, int rank)
      : barrier_(shared_address(shared.received() + warp)),
        own_(shared_address(shared.staging(warp)) + lane * 16),
        other_(shared_address(shared.staging(warp ^ kHalf)) + lane * 16),
        rank_(rank),
        receives_(rank == (C::kOneSidedSplitK ? 0 : warp / kHalf % 2)),
        is_first_lane_(lane == 0) {}

  // Returns whether the warp's rows are this CTA's; their sums are then complete. `has_rows` (does any of them exist?)
  // must be warp_uniform.
  __device__ __forceinline__ bool reduce(Sum (&sums)[C::kRowSums], bool has_rows) const {
    if (!has_rows) return false;
    receives_ ? receive(sums) : send(sums);
    return receives_;
  }

 private:
  static constexpr int kHalf = 2 * C::kMGroups;  // warps
  static constexpr int kVectorBytes = 32 * 16;   // per warp
  static constexpr int kVectors = C::kRowSums / 4, kInSlots = C::kWarpStaging / kVectorBytes;
  static_assert(kVectors <= (C::kOneSidedSplitK ? 1 : 2) * kInSlots);

  __device__ SharedAddress slot(int i) const { return (i < kInSlots ? own_ : other_) + i % kInSlots * kVectorBytes; }

  // All lanes' sums are read before any of them refills a slot.
  __device__ __forceinline__ void receive(Sum (&sums)[C::kRowSums]) const {
    if (is_first_lane_) mbarrier_expect_tx(barrier_, kVectors * kVectorBytes);
    __syncwarp();
    wait_dsmem_barrier(barrier_);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      std::uint32_t bits[4];
      load_shared(bits, slot(i));
#pragma unroll
      for (int j = 0; j < 4; ++j) add_bits(sums[4 * i + j], bits[j]);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void send(Sum const (&sums)[C::kRowSums]) const {
    int const peer = rank_ ^ 1;
    SharedAddress const barrier = dsmem_address(barrier_, peer);
    SharedAddress const own = dsmem_address(own_, peer), other = dsmem_address(other_, peer);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      Sum const* const four = sums + 4 * i;
      st_async((i < kInSlots ? own : other) + i % kInSlots * kVectorBytes,
               uint4{bits_of(four[0]), bits_of(four[1]), bits_of(four[2]), bits_of(four[3])}, barrier);
    }
  }

  SharedAddress barrier_, own_, other_;
  int rank_;
  bool receives_, is_first_lane_;
};

// Only the last tile split: every second warp's sums are sent to the other CTA, into the pipeline's stages, which are
// free once both CTAs have arrived. They are added to the local sums when the tile is stored.
template <class C>
class StageExchange {
 public:
  using Sum = typename C::Sum;

  __device__ StageExchange() = default;
  // All consumer warps. `has_rows` (does the warp have any that exist?) must be warp_uniform.
  __device__ StageExchange(GroupwiseParams const& params, typename C::Shared const& shared, int warp, int lane,
                           bool has_rows) {
    // Relaxed suffices: the stages were written by TMA and read by wgmma, both of which have been waited for.
    cluster_arrive();
    cluster_wait();
    if (!has_rows) return;
    int const rank = warp_uniform(KRange<C>::rank_in(params));
    barrier_ = shared_address(shared.received() + warp);
    slots_ = shared_address(shared.tokens(0)) + warp * kBytes + lane * 4;
    role_ = rank == warp % 2 ? kReceives : kSends;
    if (role_ == kReceives) {
      if (lane == 0) mbarrier_expect_tx(barrier_, kBytes);
      __syncwarp();
      wait_dsmem_barrier(barrier_);
    } else {
      barrier_ = dsmem_address(barrier_, rank ^ 1);
      slots_ = dsmem_address(slots_, rank ^ 1);
    }
  }

  __device__ bool sends() const { return role_ == kSends; }
  __device__ bool receives() const { return role_ == kReceives; }

  // Sends some of a lane's sums, one at a time: a vector store needs four consecutive registers, for which ptxas would
  // move all sums between products.
  template <int kCount>
  __device__ __forceinline__ void send(Sum const* some, int first) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) st_async(slots_ + (first + i) * kLine, bits_of(some[i]), barrier_);
  }
  template <int kCount>
  __device__ __forceinline__ void add_received(Sum* some, int first) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) add_bits(some[i], load_shared_bits(slots_ + (first + i) * kLine));
  }

 private:
  enum Role { kNone, kReceives, kSends };
  static constexpr int kLine = 32 * 4;  // of a warp's i-th sums
  static constexpr int kBytes = C::kN / 2 * kLine;
  static_assert(C::kConsumerWarps * kBytes <= C::kTokenStages * C::kTokenBytes + C::kStages * C::kWeightBytes);

  SharedAddress barrier_ = 0, slots_ = 0;
  Role role_ = kNone;
};

}  // namespace epiloq::gemm
