#pragma once

// Stage layout and footprint of the TMA-fed weight-only kernels, as host code that tests can check.
//
// Tensor cores read tokens in their natural order from shared memory: elements 2 t and 2 t + 1 of each 8 of K belong to
// lane t, as in a packed weight (packed_layout.h).

#include <algorithm>
#include <cstdint>

#include "core/target.h"
#include "kernels/common/occupancy.h"
#include "kernels/common/w4a16/config.h"
#include "kernels/common/w4a16/split_k.h"
#include "problems/packed_layout.h"

namespace epiloq::ops::weight_only_mm {

inline constexpr int kLine =
    128;  // bytes of tokens; TMA's 128-byte swizzle permutes the 16-byte units within eight lines
inline constexpr int kMapWord = 8;       // bytes per map element of a panel's integers: a box has at most 256 elements
inline constexpr int kAtom = 1024;       // alignment of swizzled data
inline constexpr int kColumns = 64;      // of tokens, per line
inline constexpr int kInstruction = 16;  // columns per mma instruction; of 8-bit tokens twice as many
constexpr int instruction_depth(int token_bytes) { return 2 * kInstruction / token_bytes; }
EPILOQ_HD constexpr std::uint32_t padding_to_atom(std::uint32_t address) { return (kAtom - address % kAtom) % kAtom; }
// One stage is read while another is filled.
inline constexpr int kFewestStages = 2;
constexpr int most_stages(WgmmaConfig const&) { return 8; }
constexpr int most_stages(DecodeConfig const&) { return 16; }
constexpr int barrier_bytes(int stages) { return (2 * stages + 2) * 8; }  // a multiple of 16 bytes

// A panel's integers in a stage, as in memory: a lane reads 16 bytes of a tile at a time, and a warp's are adjacent.
// Which word holds the fragment of the 16 columns from `column` on.
EPILOQ_HD constexpr int panel_bytes(int bits) { return kPanelRows * kPadding * bits / 8; }
EPILOQ_HD constexpr int tile_bytes(int bits) { return kLanes * lane_bytes(bits); }
EPILOQ_HD constexpr int lane_at(int bits, int lane, int column) {
  return column / depth(bits) * tile_bytes(bits) + lane * lane_bytes(bits);
}
EPILOQ_HD constexpr int word_of(int bits, int column) { return column % depth(bits) * bits / 64; }

// Byte offset at which a wgmma reads its columns of token 0.
EPILOQ_HD constexpr int tokens_at(int tokens, int column, int token_bytes) {
  return column * token_bytes / kLine * tokens * kLine + column * token_bytes % kLine;
}

// K steps whose weights are issued before pdl_wait: the first tokens queue behind them.
constexpr int early_steps(int tokens) { return tokens <= 32 ? 4 : 2; }

// A stage: integers, tokens, scales [panel][group][16], zero points likewise.
struct TileStage {
  int tokens_at, scales_at, zeros_at, end;
  int bytes;

  template <class Config>
  constexpr TileStage(Config const& c, int bits, int groups, int scale_bytes, int zero_bytes, int token_bytes = 2)
      : tokens_at(c.rows() / kPanelRows * panel_bytes(bits)),
        scales_at(tokens_at + c.tokens * kPadding * token_bytes),
        zeros_at(scales_at + c.rows() * groups * scale_bytes),
        end(zeros_at + c.rows() * groups * zero_bytes),
        bytes((end + kAtom - 1) / kAtom * kAtom) {}

  // For a tile with `missing` tokens fewer.
  constexpr int loaded_bytes(int missing, int token_bytes) const { return end - missing * kPadding * token_bytes; }
};

// Whether CTAs that split K exchange sums through the stages rather than a buffer behind them (w4a16_split_k.cuh): with
// one K group and more than 32 tokens.
constexpr bool reduces_in_stages(int k_groups, int tokens) { return k_groups == 1 && tokens > 32; }
constexpr bool reduces_in_stages(WgmmaConfig const& c) { return reduces_in_stages(c.k_groups, c.tokens); }

// Buffer for the partial sums of subtiles of 16 rows by 8 tokens from other CTAs; and for a CTA's own.
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

// Sums that replace the stages after the main loop: a K group's, [token][row]; those of all K groups; of all CTAs.
constexpr int sum_bytes(DecodeConfig const& c) { return c.k_groups * sum_bytes(c.rows(), c.tokens); }
constexpr int sum_bytes(WgmmaConfig const& c) {
  return c.k_groups > 1         ? (c.k_groups - 1) * c.tokens * c.rows() * 4
         : reduces_in_stages(c) ? received_bytes(c, true)
                                : 0;
}

// Bytes of the exchange buffer behind the stages: sums from other CTAs, or from K groups.
constexpr int exchange_bytes(WgmmaConfig const& c) {
  return c.k_groups > 1         ? std::max(sum_bytes(c), received_bytes(c, false))
         : reduces_in_stages(c) ? 0
                                : received_bytes(c, true);
}
constexpr int exchange_bytes(DecodeConfig const& c) { return received_bytes(c, false); }

// As many stages as fit an SM with all its resident CTAs, beside barriers, the exchange buffer and alignment. A
// multiple of the K groups, so that a stage always belongs to the same group: one parity bit could not tell another
// group's use from its own.
template <class Config>
constexpr int stage_count(Config const& c, TileStage const& stage, int shared_bytes) {
  int const room = (shared_bytes + kReservedPerCta) / resident_blocks(c) - kReservedPerCta;
  int const fit = (room - kAtom - barrier_bytes(most_stages(c)) - exchange_bytes(c)) / stage.bytes;
  return std::min(most_stages(c), fit) / c.k_groups * c.k_groups;
}

// Offset from the first stage.
template <class Config>
constexpr int exchange_at(Config const& c, TileStage const& stage, int shared_bytes) {
  return std::max(stage_count(c, stage, shared_bytes) * stage.bytes, sum_bytes(c));
}

// Per CTA, without the barriers.
template <class Config>
constexpr int pipeline_shared_bytes(Config const& c, TileStage const& stage, int shared_bytes) {
  return kAtom + exchange_at(c, stage, shared_bytes) + exchange_bytes(c);
}

}  // namespace epiloq::ops::weight_only_mm
