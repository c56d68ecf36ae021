#pragma once

// Split-K epilogue of the weight-only WGMMA GEMM over the CTAs of a cluster, which may have K groups too: partial sums
// of the same rows are distributed by 8-token groups, four sums per lane.
//
// Code that runs once is dominated by instruction fetch, so only what must name its registers is unrolled per token
// group.

#include "kernels/common/w4a16/split_k.cuh"
#include "kernels/sm90/w4a16/w4a16_mainloop.cuh"
#include "kernels/sm90/w4a16/w4a16_prologue.cuh"

namespace epiloq::ops::weight_only_mm {

// Number of 8-token groups with valid tokens.
template <class C>
__device__ __forceinline__ int token_groups_of(typename C::WorkTile const& work, int tokens) {
  return min(C::kTokens / 8, (tokens - work.first_token + 7) / 8);
}

// First reduces over the CTA's K groups, in the stages, which a CTA with a single tile no longer needs; then over the
// CTAs, through the buffer behind them.
template <class C>
class KGroupsEpilogue {
 public:
  using Mainloop = WgmmaMainloop<C>;
  using Sums = typename Mainloop::Sums;
  using WorkTile = typename C::WorkTile;

  __device__ __forceinline__ KGroupsEpilogue(TileParams const& params, Mainloop const& mainloop, SharedAddress received,
                                             SharedAddress stages)
      : params_(params),
        p_(params.p),
        reduction_(blockIdx.y, gridDim.y, received, stages + params.exchange_at),
        panel_(mainloop.panel),
        k_group_(warp_uniform(threadIdx.x / C::kKGroupThreads)),
        slots_(stages + mainloop.lane * SubtileReduction::kPartBytes +
               panel_ * kTokenGroups * kSlots * SubtileReduction::kSubtileBytes) {}

  // Stores the token groups that this warp owns.
  __device__ __forceinline__ void store(Sums const& sums, WorkTile const& work) const {
    int const token_groups = token_groups_of<C>(work, p_.m);
    Subtile const first = Subtile::of(first_subtile(panel_, k_group_, token_groups, C::kKGroups), reduction_.split);
    float4 own[kOwn];
    sync_k_groups(own, sums[0]);
    distribute(own, token_groups, first);
    store_own(own, token_groups, first, work);
  }

 private:
  static constexpr int kTokenGroups = C::kTokens / 8, kOwn = kTokenGroups / C::kKGroups, kBarrier = 2;
  // A warp's own sums wait for the others' in registers if they are few, unless six warpgroups leave none; otherwise in
  // the stages.
  static constexpr bool kInRegisters = kOwn <= 2 && C::kConsumerWarpgroups < 6;
  static constexpr int kSlots = C::kKGroups - 1;  // in the stages, per token group
  static_assert(C::kBlocks == 1 && kTokenGroups % C::kKGroups == 0 && kBarrier + C::kPanels <= 16);

  // The slot for the K group `distance` before the token group's own. The first slot later holds the owner's own sums.
  __device__ __forceinline__ SharedAddress slot_of(int token_group, int distance) const {
    return slots_ + (token_group * kSlots + distance - 1) * SubtileReduction::kSubtileBytes;
  }

  // The n-th token group of a K group.
  static __device__ __forceinline__ float4 part_of(float const (&sums)[Mainloop::kSums], int n, int k_group) {
    float4 part;
#pragma unroll
    for (int other = 0; other < C::kKGroups; ++other) {
      float const* const of = sums + (n * C::kKGroups + other) * 4;
      if (other == 0 || other == k_group) part = {of[0], of[1], of[2], of[3]};
    }
    return part;
  }

  // The warp's own token groups, summed over K groups.
  __device__ __forceinline__ void sync_k_groups(float4 (&own)[kOwn], float const (&sums)[Mainloop::kSums]) const {
    sync_consumers<C>();  // all stages have been read
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      own[n] = part_of(sums, n, k_group_);
#pragma unroll
      for (int distance = 1; distance < C::kKGroups; ++distance) {
        int const k_group = (k_group_ + distance) % C::kKGroups;
        gemm::store_shared_four(slot_of(n * C::kKGroups + k_group, distance), part_of(sums, n, k_group));
      }
    }
    // Synchronises the warps of all K groups with the same rows.
    asm volatile("bar.sync %0, %1;" ::"r"(kBarrier + panel_), "n"(32 * C::kKGroups) : "memory");
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
#pragma unroll
      for (int distance = 1; distance < C::kKGroups; ++distance) {
        own[n] = own[n] + gemm::load_shared_four(slot_of(n * C::kKGroups + k_group_, distance));
      }
    }
  }

  // Sends partial sums to the CTAs that own them.
  __device__ __forceinline__ void distribute(float4 const (&own)[kOwn], int token_groups, Subtile subtile) const {
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      int const token_group = n * C::kKGroups + k_group_;
      if (token_group >= token_groups) return;
      if (reduction_.is_own(subtile)) {
        if constexpr (!kInRegisters) gemm::store_shared_four(slot_of(token_group, 1), own[n]);
      } else {
        reduction_.send_partial(subtile, own[n]);
      }
      subtile = subtile.next(reduction_.split);
    }
  }

  __device__ __forceinline__ void store_own(float4 const (&own)[kOwn], int token_groups, Subtile subtile,
                                            WorkTile const& work) const {
    DirectRows<typename C::T> const rows(p_, (work.first_panel + panel_) * kPanelRows);
    wait_dsmem_barrier(reduction_.barrier);
    constexpr int kCopies = kInRegisters ? kOwn : 1;
#pragma unroll kCopies
    for (int n = 0; n < kOwn; ++n, subtile = subtile.next(reduction_.split)) {
      int const token_group = n * C::kKGroups + k_group_;
      if (token_group >= token_groups || !reduction_.is_own(subtile)) continue;
      float4 sum;
      if constexpr (kInRegisters) {
        sum = own[n];
      } else {
        sum = gemm::load_shared_four(slot_of(token_group, 1));
      }
#pragma unroll 1
      for (int distance = 1; distance < reduction_.split; ++distance)
        sum = sum + reduction_.received(subtile, distance);
      float const four[] = {sum.x, sum.y, sum.z, sum.w};
      Mainloop::store(params_, rows, work.first_token + token_group * 8, four);
    }
  }

  TileParams const& params_;
  Problem const& p_;
  SubtileReduction reduction_;
  int panel_, k_group_;
  SharedAddress slots_;
};

// A single K group holds all of a CTA's sums, for more than 32 tokens too many for the buffer behind the stages. CTAs
// then write into each other's stages once all have arrived: those were written by TMA and read by wgmma, both of which
// have been waited for, so relaxed arrival suffices.
template <class C>
class SingleKGroupEpilogue {
 public:
  using Mainloop = WgmmaMainloop<C>;
  using WorkTile = typename C::WorkTile;

  __device__ __forceinline__ SingleKGroupEpilogue(TileParams const& params, Mainloop const& mainloop,
                                                  SharedAddress received, SharedAddress stages)
      : params_(params),
        p_(params.p),
        rank_(blockIdx.y),
        split_(gridDim.y),
        panel_(mainloop.panel),
        received_(in_register(received)),
        slots_(in_register(stages + (C::kReducesInStages ? 0 : params.exchange_at) +
                           mainloop.lane * SubtileReduction::kPartBytes)) {}

  // Stores the subtiles that this warp owns.
  __device__ __forceinline__ void store(typename Mainloop::Sums const& sums, WorkTile const& work) const {
    int const token_groups = token_groups_of<C>(work, p_.m);
    if constexpr (C::kReducesInStages) {
      cluster_arrive();
      cluster_wait();
    }
#pragma unroll
    for (int block = 0; block < C::kBlocks; ++block) distribute(sums[block], token_groups, panel_of(block));
#pragma unroll 1
    for (int block = 0; block < C::kBlocks; ++block) store_own(token_groups, panel_of(block), work);
  }

 private:
  static constexpr int kSubtileBytes = SubtileReduction::kSubtileBytes;

  __device__ __forceinline__ int panel_of(int block) const { return panel_ + block * 4; }

  // Slot of the n-th subtile in its owner, for the sums of CTA `rank`; those of all CTAs are adjacent.
  __device__ __forceinline__ SharedAddress slot(int number, int owner, int rank) const {
    return slots_ + (number - owner + rank) * kSubtileBytes;
  }

  __device__ __forceinline__ void distribute(float const (&sums)[Mainloop::kSums], int token_groups, int panel) const {
    int const first = first_subtile(panel, 0, token_groups, 1);
    int owner = first % split_;
#pragma unroll
    for (int token_group = 0; token_group < C::kTokens / 8; ++token_group) {
      if (token_group >= token_groups) return;
      float const* const of = sums + token_group * 4;
      float4 const part{of[0], of[1], of[2], of[3]};
      SharedAddress const to = slot(first + token_group, owner, rank_);
      if (owner == rank_) {
        gemm::store_shared_four(to, part);
      } else {
        st_async(dsmem_address(to, owner), part, dsmem_address(received_, owner));
      }
      owner = owner + 1 == split_ ? 0 : owner + 1;
    }
  }

  __device__ __forceinline__ void store_own(int token_groups, int panel, WorkTile const& work) const {
    DirectRows<typename C::T> const rows(p_, (work.first_panel + panel) * kPanelRows);
    wait_dsmem_barrier(received_);
    int const first = first_subtile(panel, 0, token_groups, 1);
#pragma unroll 1
    for (int token_group = (rank_ + split_ - first % split_) % split_; token_group < token_groups;
         token_group += split_) {
      float4 sum = gemm::load_shared_four(slot(first + token_group, rank_, 0));
#pragma unroll 1
      for (int rank = 1; rank < split_; ++rank) {
        sum = sum + gemm::load_shared_four(slot(first + token_group, rank_, rank));
      }
      float const four[] = {sum.x, sum.y, sum.z, sum.w};
      Mainloop::store(params_, rows, work.first_token + token_group * 8, four);
    }
  }

  TileParams const& params_;
  Problem const& p_;
  int rank_, split_, panel_;
  SharedAddress received_, slots_;
};

template <class C>
using SplitKEpilogue = std::conditional_t<C::kKGroups == 1, SingleKGroupEpilogue<C>, KGroupsEpilogue<C>>;

}  // namespace epiloq::ops::weight_only_mm
