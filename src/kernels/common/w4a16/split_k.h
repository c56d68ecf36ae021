#pragma once

// Where the sums of a piece that other blocks finish lie there: in slots that follow one another, those of the next
// block first.

#include "kernels/common/split_k.h"
#include "kernels/common/w4a16/config.h"

namespace epiloq::ops::weight_only_mm {

using gemm::Piece;
using gemm::Pieces;

// Of the block that comes `distance` places after the piece's, from 1 on.
EPILOQ_HD constexpr int slot_of(Piece const& piece, int distance, int split) {
  return piece.turn * (split - 1) + distance - 1;
}
// In each block, for the sums of the others.
EPILOQ_HD constexpr int slots_of(int pieces, int split) { return (pieces + split - 1) / split * (split - 1); }

// A wgmma tile's pieces, [slab][way along K][the way's eights of tokens]: a warp's follow one another. Numbered by
// slabs first, those of one block would be a few warps' wherever two, four or eight blocks share K: 0.1 us later by two
// of them and 0.5 by four.
EPILOQ_HD constexpr int first_piece(int slab, int way, int eights, int ways) {
  int const longer = eights % ways;
  return slab * eights + way * (eights / ways) + (way < longer ? way : longer);
}

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
