#pragma once

// Which block of a cluster that shares K finishes which piece of a tile: the n-th is block n % split's, to which the
// others send their sums of it.

#include "epilogue/expr.h"

namespace epiloq::gemm {

// Of a piece: its block, and how many of that block's come before it. Neighbours follow without a division.
struct Subtile {
  int owner, ordinal;

  EPILOQ_HD static constexpr Subtile of(int number, int split) { return {number % split, number / split}; }
  EPILOQ_HD constexpr Subtile next(int split) const {
    return owner + 1 == split ? Subtile{0, ordinal + 1} : Subtile{owner + 1, ordinal};
  }
};

// As the block `rank` sees them.
struct SubtileOwnership {
  int rank, split;

  EPILOQ_HD constexpr bool is_own(Subtile const& subtile) const { return subtile.owner == rank; }
  EPILOQ_HD constexpr int own_of(int subtiles) const { return (subtiles - rank + split - 1) / split; }
  // How many places after the piece's block this one comes.
  EPILOQ_HD constexpr int distance_to(Subtile const& subtile) const {
    return rank - subtile.owner + (rank < subtile.owner ? split : 0);
  }
};

}  // namespace epiloq::gemm
