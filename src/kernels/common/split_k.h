#pragma once

// Ownership of a tile's subtiles in a split-K reduction over a cluster (a reduce-scatter through DSMEM): subtile n
// belongs to CTA n % split, to which the others send their partial sums.

#include "epilogue/expr.h"

namespace epiloq::gemm {

// The owner of a subtile and how many of the owner's subtiles come before it. The next subtile follows without a
// division.
struct Subtile {
  int owner, ordinal;

  EPILOQ_HD static constexpr Subtile of(int number, int split) { return {number % split, number / split}; }
  EPILOQ_HD constexpr Subtile next(int split) const {
    return owner + 1 == split ? Subtile{0, ordinal + 1} : Subtile{owner + 1, ordinal};
  }
};

// Ownership of the subtiles from the point of view of CTA `rank`.
struct SubtileOwnership {
  int rank, split;

  EPILOQ_HD constexpr bool is_own(Subtile const& subtile) const { return subtile.owner == rank; }
  EPILOQ_HD constexpr int own_of(int subtiles) const { return (subtiles - rank + split - 1) / split; }
  // How many ranks after the subtile's owner this CTA comes, modulo the cluster size.
  EPILOQ_HD constexpr int distance_to(Subtile const& subtile) const {
    return rank - subtile.owner + (rank < subtile.owner ? split : 0);
  }
};

}  // namespace epiloq::gemm
