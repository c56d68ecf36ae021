#pragma once

// Which tiles of D a block of a group-wise kernel takes, and whose expert's they are.

#include <cute/arch/cluster_sm90.hpp>

#include "gemm/config.h"
#include "gemm/groupwise_problem.h"

namespace epiloq::gemm {

// One tile of D for a block; the blocks of a cluster take neighbours.
struct GroupwiseTile {
  int first_row, end_row;  // of A and D
  int first_column;
  int expert;
};

// The tiles of a block, one after the other, in bands of rows so that the tiles in flight share tokens and weights in
// L2.
template <class C>
class GroupwiseScheduler {
 public:
  __device__ explicit GroupwiseScheduler(GroupwiseProblem const& p)
      : p_(p),
        columns_(ceil_div(p.n, C::kN * (C::kShare == Share::kTokens ? C::kCluster : 1))),
        index_(blockIdx.x / C::kCluster) {
    enter(0);
  }

  __device__ bool next(GroupwiseTile& tile) {
    while (index_ - before_ >= rows_ * columns_) {
      if (expert_ + 1 >= p_.experts) return false;
      before_ += rows_ * columns_;
      enter(expert_ + 1);
    }
    constexpr int kBand = 8;
    int const local = index_ - before_, band = local / (kBand * columns_);
    int const height = min(kBand, rows_ - band * kBand), within = local - band * kBand * columns_;
    int row = band * kBand + within % height, column = within / height;
    int const rank = C::kCluster > 1 ? static_cast<int>(cute::block_rank_in_cluster()) : 0;
    if constexpr (C::kShare == Share::kTokens) column = column * C::kCluster + rank;
    if constexpr (C::kShare == Share::kWeights) row = row * C::kCluster + rank;
    tile = {begin_ + row * C::kM, end_, column * C::kN, expert_};
    index_ += gridDim.x / C::kCluster;
    return true;
  }

 private:
  static __device__ int ceil_div(int a, int b) { return (a + b - 1) / b; }
  __device__ void enter(int expert) {
    expert_ = expert;
    begin_ = 0, end_ = p_.m;
    if (p_.offs != nullptr) {
      begin_ = expert == 0 ? 0 : p_.offs[expert - 1];
      end_ = p_.offs[expert];
    } else if (p_.masked_m != nullptr) {
      begin_ = expert * p_.m;
      end_ = begin_ + p_.masked_m[expert];
    }
    rows_ = ceil_div(end_ - begin_, C::kM * (C::kShare == Share::kWeights ? C::kCluster : 1));
  }

  GroupwiseProblem const& p_;
  int columns_;  // tiles of a cluster along N
  int index_;
  int expert_ = 0, before_ = 0;
  int begin_ = 0, end_ = 0, rows_ = 0;
};

}  // namespace epiloq::gemm
