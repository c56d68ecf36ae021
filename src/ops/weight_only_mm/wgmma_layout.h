#pragma once

// Shapes and addresses of the wgmma kernel, so that host code can count and test them.
//
// A wgmma takes the tokens in their natural order from shared memory: slots 2 t and 2 t + 1 of each 8 of K are lane
// t's. In a packed weight (layout.h) lane t has columns 8 t to 8 t + 7 of each 32 instead, so a lane reads its columns
// from what lies there for the four lanes of its row.

#include <algorithm>
#include <cstdint>

#include "ops/weight_only_mm/configs.h"
#include "ops/weight_only_mm/layout.h"

namespace epiloq::ops::weight_only_mm {

inline constexpr int kLine = 128;        // bytes; TMA's widest swizzle permutes the 16 bytes of each eight lines
inline constexpr int kAtom = 1024;       // where swizzled data begins
inline constexpr int kColumns = 64;      // of the tokens that a line holds
inline constexpr int kPiece = 32;        // columns that are made into fragments at a time
inline constexpr int kInstruction = 16;  // columns of a wgmma
inline constexpr int kMaxStages = 8;
inline constexpr int kBarrierBytes = 2 * kMaxStages * 8;

// Where TMA puts a byte of a box.
EPILOQ_HD constexpr int swizzled(int at) { return at ^ at / kLine % 8 * 16; }

// Of a slab's integers in a stage: the first byte that a lane reads of 32 columns. The place of tile 1 differs from
// that of tile 0 in one bit beside the tile's own.
EPILOQ_HD constexpr int slab_bytes(int bits) { return kSlab * kPadding * bits / 8; }
EPILOQ_HD constexpr int tile_bytes(int bits) { return kLanes * lane_bytes(bits); }
EPILOQ_HD constexpr int tile_of(int bits, int piece) { return piece * kPiece / depth(bits); }
EPILOQ_HD constexpr int in_tile(int at, int bits, int tile) { return tile * tile_bytes(bits) + (at ^ tile % 2 * 64); }

// 4 bits: words that a lane reads of 16-byte unit `unit`, that of lane 4 g + unit. Both halves of word f serve lanes
// 2 f and 2 f + 1, which take the bytes of their columns from the words of two units.
EPILOQ_HD constexpr int first_word_at(int lane) { return swizzled(lane / 4 * 64) + lane % 4 / 2 * 4; }
EPILOQ_HD constexpr int word_at(int first, int piece, int unit) {
  return in_tile(first ^ unit * 16, 4, tile_of(4, piece)) + piece % 2 * 8;
}
EPILOQ_HD constexpr unsigned bytes_of_lane(int lane) { return lane % 2 == 0 ? 0x6240u : 0x7351u; }

// 8 bits: the 16 bytes that a lane names to ldmatrix, row lane % 8 of matrix lane / 8, that of unit lane / 8.
EPILOQ_HD constexpr int first_row_at(int lane) { return swizzled(lane % 8 * 64 + lane / 8 * 16); }
EPILOQ_HD constexpr int row_at(int first, int piece) { return in_tile(first, 8, tile_of(8, piece)); }

// Of the tokens in a stage: the byte from which a wgmma reads its columns of token 0.
EPILOQ_HD constexpr int tokens_at(int tokens, int column) {
  return column / kColumns * tokens * kLine + column % kColumns * 2;
}

// A stage: integers, tokens, scales [slab][group][16], zero points likewise.
struct WgmmaStage {
  int tokens_at, scales_at, zeros_at, end;
  int bytes;

  constexpr WgmmaStage(WgmmaConfig const& c, int bits, int groups, int scale_bytes, int zero_bytes)
      : tokens_at(c.rows() / kSlab * slab_bytes(bits)),
        scales_at(tokens_at + c.tokens * kPadding * 2),
        zeros_at(scales_at + c.rows() * groups * scale_bytes),
        end(zeros_at + c.rows() * groups * zero_bytes),
        bytes((end + kAtom - 1) / kAtom * kAtom) {}

  // Of a tile with so many tokens fewer.
  constexpr int loaded_bytes(int missing) const { return end - missing * kPadding * 2; }
};

constexpr int wgmma_sum_bytes(WgmmaConfig const& c) { return c.tokens * (c.rows() + 4) * 4; }

// As many stages as fit, beside barriers and what it takes to begin at a multiple of kAtom.
constexpr int wgmma_stages(WgmmaStage const& stage, int shared_bytes) {
  return std::min(kMaxStages, (shared_bytes - kAtom - kBarrierBytes) / stage.bytes);
}

// Of a block, beside its barriers.
constexpr int wgmma_shared_bytes(WgmmaConfig const& c, WgmmaStage const& stage, int shared_bytes) {
  return kAtom + std::max(wgmma_stages(stage, shared_bytes) * stage.bytes, wgmma_sum_bytes(c));
}

}  // namespace epiloq::ops::weight_only_mm
