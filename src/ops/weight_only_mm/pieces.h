#pragma once

// Which block of a cluster that shares K finishes which piece of a tile: the n-th is block n % split's. The others'
// sums of it come into slots that follow one another there, those of the next block first.

#include "epilogue/expr.h"
#include "ops/weight_only_mm/configs.h"

namespace epiloq::ops::weight_only_mm {

// Of a piece: its block, and how many of that block's come before it. Pieces that are a constant number apart are
// walked through without a division each.
struct Piece {
  int owner, turn;

  EPILOQ_HD static constexpr Piece of(int number, int split) { return {number % split, number / split}; }
  EPILOQ_HD constexpr Piece after(Piece const& step, int split) const {
    int const sum = owner + step.owner;
    return {sum < split ? sum : sum - split, turn + step.turn + (sum < split ? 0 : 1)};
  }
};

struct Pieces {
  int rank, split;

  EPILOQ_HD constexpr bool is_own(Piece const& piece) const { return piece.owner == rank; }
  EPILOQ_HD constexpr int own_of(int pieces) const { return (pieces - rank + split - 1) / split; }

  // Where the owner has the sums of the block that comes `distance` places after it, from 1 on; and this block's
  // distance.
  EPILOQ_HD constexpr int slot(Piece const& piece, int distance) const {
    return piece.turn * (split - 1) + distance - 1;
  }
  EPILOQ_HD constexpr int distance_to(Piece const& piece) const {
    return rank - piece.owner + (rank < piece.owner ? split : 0);
  }
};

// In each block, for the sums of the others.
EPILOQ_HD constexpr int slots_of(int pieces, int split) { return (pieces + split - 1) / split * (split - 1); }

// A stream's pieces are so many elements. Where its blocks share K, their shared memory begins with a barrier and
// slots.
inline constexpr int kPieceElements = 128, kReceivedBarrierBytes = kSharedLine;
EPILOQ_HD constexpr int stream_pieces(int tokens, int rows) {
  return (tokens * rows + kPieceElements - 1) / kPieceElements;
}
EPILOQ_HD constexpr int stream_received_bytes(int tokens, int rows, int split) {
  return split > 1 ? kReceivedBarrierBytes + slots_of(stream_pieces(tokens, rows), split) * kPieceElements * 4 : 0;
}

}  // namespace epiloq::ops::weight_only_mm
