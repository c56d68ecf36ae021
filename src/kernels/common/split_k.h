#pragma once

// Which block of a cluster that shares K finishes which piece of a tile: the n-th is block n % split's, to which the
// others send their sums of it.

#include "epilogue/expr.h"

namespace epiloq::gemm {

// Of a piece: its block, and how many of that block's come before it. Neighbours follow without a division.
struct Piece {
  int owner, turn;

  EPILOQ_HD static constexpr Piece of(int number, int split) { return {number % split, number / split}; }
  EPILOQ_HD constexpr Piece next(int split) const {
    return owner + 1 == split ? Piece{0, turn + 1} : Piece{owner + 1, turn};
  }
};

// As the block `rank` sees them.
struct Pieces {
  int rank, split;

  EPILOQ_HD constexpr bool is_own(Piece const& piece) const { return piece.owner == rank; }
  EPILOQ_HD constexpr int own_of(int pieces) const { return (pieces - rank + split - 1) / split; }
  // How many places after the piece's block this one comes.
  EPILOQ_HD constexpr int distance_to(Piece const& piece) const {
    return rank - piece.owner + (rank < piece.owner ? split : 0);
  }
};

}  // namespace epiloq::gemm
