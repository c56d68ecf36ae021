#pragma once

// K shared by the two blocks of a cluster, where a layer has too few tiles for all SMs, or tiles so narrow that tokens
// cost more than weights. The second block has less of K and sends all of its sums, which are there when the first has
// its own; or each has half of K, then half of the tile's rows (kGivesAll says which).

#include <cute/arch/cluster_sm90.hpp>

#include "core/cluster.cuh"
#include "gemm/sm90_groupwise_tile.cuh"
#include "gemm/tma.cuh"

namespace epiloq::gemm {

// A block's steps of K. Built by whole warps; said to be uniform, as all that a branch around products depends on: else
// their addresses would not be in uniform registers, which took 25 cycles a step.
struct StepShare {
  int first, depth, rank;
  bool is_all;

  __device__ explicit StepShare(GroupwiseParams const& params) {
    is_all = params.p.k_blocks == 1;
    rank = is_all ? 0 : uniform(cute::block_rank_in_cluster());
    first = rank * params.steps_of_first;
    depth = min(params.steps_of_first, (params.p.k + kGroupDepth - 1) / kGroupDepth - first);
  }
};

// A warp whose rows the other block keeps sends its sums there, into the slots of the warp that has the same rows and,
// where those have no room, of one of the other half, whose rows that block gives away.
template <class C>
class RowExchange {
 public:
  using Sum = typename C::Sum;

  // `warp` of those of all rows.
  __device__ RowExchange(typename C::Shared const& shared, int warp, int lane, int rank)
      : barrier_(shared_address(shared.received() + warp)),
        own_(shared_address(shared.staging(warp)) + lane * 16),
        other_(shared_address(shared.staging(warp ^ kHalf)) + lane * 16),
        rank_(rank),
        takes_(rank == (C::kGivesAll ? 0 : warp / kHalf % 2)),
        is_first_lane_(lane == 0) {}

  // Whether the warp's rows are this block's; then sums are whole. `has_rows` (are any of them there?) is
  // uniform, and said to be.
  __device__ __forceinline__ bool meet(Sum (&sums)[C::kRowSums], bool has_rows) const {
    if (!has_rows) return false;
    takes_ ? take(sums) : give(sums);
    return takes_;
  }

 private:
  static constexpr int kHalf = 2 * C::kMGroups;  // warps
  static constexpr int kVectorBytes = 32 * 16;   // of a warp
  static constexpr int kVectors = C::kRowSums / 4, kInSlots = C::kWarpStaging / kVectorBytes;
  static_assert(!C::kMayShare || kVectors <= (C::kGivesAll ? 1 : 2) * kInSlots);

  __device__ SharedAddress place(int i) const { return (i < kInSlots ? own_ : other_) + i % kInSlots * kVectorBytes; }

  // All lanes' sums are read before any of them fills a slot.
  __device__ __forceinline__ void take(Sum (&sums)[C::kRowSums]) const {
    if (is_first_lane_) expect_bytes(barrier_, kVectors * kVectorBytes);
    __syncwarp();
    wait_for_sent(barrier_);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      std::uint32_t bits[4];
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(bits[0]), "=r"(bits[1]), "=r"(bits[2]), "=r"(bits[3])
                   : "r"(place(i)));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (C::kExact) {
          sums[4 * i + j] += bits[j];
        } else {
          sums[4 * i + j] += __uint_as_float(bits[j]);
        }
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void give(Sum const (&sums)[C::kRowSums]) const {
    int const there = rank_ ^ 1;
    SharedAddress const barrier = address_in_block(barrier_, there);
    SharedAddress const own = address_in_block(own_, there), other = address_in_block(other_, there);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      std::uint32_t bits[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (C::kExact) {
          bits[j] = sums[4 * i + j];
        } else {
          bits[j] = __float_as_uint(sums[4 * i + j]);
        }
      }
      send((i < kInSlots ? own : other) + i % kInSlots * kVectorBytes, uint4{bits[0], bits[1], bits[2], bits[3]},
           barrier);
    }
  }

  SharedAddress barrier_, own_, other_;
  int rank_;
  bool takes_, is_first_lane_;
};

}  // namespace epiloq::gemm
