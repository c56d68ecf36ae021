#pragma once

// Shapes and addresses of kernels whose steps TMA copies into a ring, so that host code can count and test them.
//
// The tensor cores take the tokens in their natural order from shared memory: slots 2 t and 2 t + 1 of each 8 of K are
// lane t's, and those it has in a packed weight (packed_layout.h).

#include <algorithm>
#include <cstdint>

#include "core/target.h"
#include "kernels/common/occupancy.h"
#include "kernels/common/w4a16/config.h"
#include "kernels/common/w4a16/split_k.h"
#include "problems/packed_layout.h"

namespace epiloq::ops::weight_only_mm {

inline constexpr int kLine = 128;    // bytes, of tokens; TMA's widest swizzle permutes the 16 bytes of each eight lines
inline constexpr int kMapWord = 8;   // bytes that TMA counts a panel's integers by: a box has at most 256
inline constexpr int kAtom = 1024;   // where swizzled data begins
inline constexpr int kColumns = 64;  // of the tokens that a line holds
inline constexpr int kInstruction = 16;  // columns of a product
// Stages of a ring: one is read while the other is filled; and a warp that has a step to itself holds it for longer.
inline constexpr int kFewestStages = 2;
constexpr int most_stages(WgmmaConfig const&) { return 8; }
constexpr int most_stages(DecodeConfig const&) { return 16; }
constexpr int barrier_bytes(int stages) { return (2 * stages + 2) * 8; }  // whole 16 bytes

// Of a panel's integers in a stage, which lie as in memory: a lane reads 16 bytes of a tile at a time, and those of a
// warp are neighbours. The fragment of 16 columns from `column` on begins at a word of them.
EPILOQ_HD constexpr int panel_bytes(int bits) { return kPanelRows * kPadding * bits / 8; }
EPILOQ_HD constexpr int tile_bytes(int bits) { return kLanes * lane_bytes(bits); }
EPILOQ_HD constexpr int lane_at(int bits, int lane, int column) {
  return column / depth(bits) * tile_bytes(bits) + lane * lane_bytes(bits);
}
EPILOQ_HD constexpr int word_of(int bits, int column) { return column % depth(bits) * bits / 64; }

// Of the tokens in a stage: the byte from which a wgmma reads its columns of token 0.
EPILOQ_HD constexpr int tokens_at(int tokens, int column) {
  return column / kColumns * tokens * kLine + column % kColumns * 2;
}

// Steps whose weights a block asks for before the previous kernel has finished: its first tokens stand behind them.
constexpr int early_steps(int tokens) { return tokens <= 32 ? 4 : 2; }

// A stage: integers, tokens, scales [panel][group][16], zero points likewise.
struct TileStage {
  int tokens_at, scales_at, zeros_at, end;
  int bytes;

  template <class Config>
  constexpr TileStage(Config const& c, int bits, int groups, int scale_bytes, int zero_bytes)
      : tokens_at(c.rows() / kPanelRows * panel_bytes(bits)),
        scales_at(tokens_at + c.tokens * kPadding * 2),
        zeros_at(scales_at + c.rows() * groups * scale_bytes),
        end(zeros_at + c.rows() * groups * zero_bytes),
        bytes((end + kAtom - 1) / kAtom * kAtom) {}

  // Of a tile with so many tokens fewer.
  constexpr int loaded_bytes(int missing) const { return end - missing * kPadding * 2; }
};

// Blocks that share K send each other sums (w4a16_split_k.cuh) to a place behind the ring; or, where one way along K
// has all of them, and they are many, into it.
constexpr bool lends_ring(int k_groups, int tokens) { return k_groups == 1 && tokens > 32; }
constexpr bool lends_ring(WgmmaConfig const& c) { return lends_ring(c.k_groups, c.tokens); }

// For the sums of other blocks of the pieces that one finishes, of 16 rows by 8 tokens each; and for its own.
template <class Config>
constexpr int received_bytes(Config const& c, bool and_own) {
  int const subtiles = c.rows() / kPanelRows * (c.tokens / 8);
  int most = 0;
  for (int split = 2; split <= kMaxCluster; ++split) {
    int const finished = (subtiles + split - 1) / split;
    most = std::max(most, receive_slots(subtiles, split) + (and_own ? finished : 0));
  }
  return most * kPanelRows * 8 * 4;
}

// What lies where the ring was: a way's sums, [token][row]; those of a block's ways; those of blocks.
constexpr int sum_stride(DecodeConfig const& c) { return c.rows() + 4; }
constexpr int sum_bytes(DecodeConfig const& c) { return c.k_groups * c.tokens * sum_stride(c) * 4; }
constexpr int sum_bytes(WgmmaConfig const& c) {
  return c.k_groups > 1 ? (c.k_groups - 1) * c.tokens * c.rows() * 4 : lends_ring(c) ? received_bytes(c, true) : 0;
}

// And behind it: what blocks send, or what a block's ways do that has a tile to itself.
constexpr int exchange_bytes(WgmmaConfig const& c) {
  return c.k_groups > 1  ? std::max(sum_bytes(c), received_bytes(c, false))
         : lends_ring(c) ? 0
                         : received_bytes(c, true);
}
constexpr int exchange_bytes(DecodeConfig const& c) { return received_bytes(c, false); }

// As many stages as an SM has room for, of all its blocks, beside barriers, the place for sums, and what it takes to
// begin at a multiple of kAtom. A stage is always the same way's: one that came to another's before that one's copies
// had, a turn early, would take the parity of the turn before for its own.
template <class Config>
constexpr int ring_stages(Config const& c, TileStage const& stage, int shared_bytes) {
  int const room = (shared_bytes + kReservedPerCta) / resident_blocks(c) - kReservedPerCta;
  int const fit = (room - kAtom - barrier_bytes(most_stages(c)) - exchange_bytes(c)) / stage.bytes;
  return std::min(most_stages(c), fit) / c.k_groups * c.k_groups;
}

// From the first stage on.
template <class Config>
constexpr int exchange_at(Config const& c, TileStage const& stage, int shared_bytes) {
  return std::max(ring_stages(c, stage, shared_bytes) * stage.bytes, sum_bytes(c));
}

// Of a block, beside its barriers.
template <class Config>
constexpr int ring_shared_bytes(Config const& c, TileStage const& stage, int shared_bytes) {
  return kAtom + exchange_at(c, stage, shared_bytes) + exchange_bytes(c);
}

}  // namespace epiloq::ops::weight_only_mm
