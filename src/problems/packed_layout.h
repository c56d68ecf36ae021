#pragma once

// Layout of a packed weight, the same for every kernel: a lane's 16 bytes are its A fragments of mma.sync m16n8k16 (or
// wgmma) for several K steps, so that weights go from memory through registers to the tensor cores with one coalesced
// load, while activations keep their own order.
//
// A tile is 16 rows (a panel) by `depth` columns, 32 lanes of `lane_bytes`. One word of 4-bit values, or two of 8-bit
// values, is a lane's fragment of 16 columns: lane 4 g + t has columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of rows g and
// g + 8. Two such fragments, a block of 32 columns, are one word of 2-bit values, or a word and a half of 3-bit values
// (narrow_codes.h).

#include <cstdint>

#include "epilogue/expr.h"

namespace epiloq::ops::weight_only_mm {

inline constexpr int kPanelRows = 16;  // rows of a tile
inline constexpr int kLanes = 32;      // of a tile
inline constexpr int kPadding = 128;   // K is padded to a multiple of this

// Columns of a tile, and bytes per lane.
EPILOQ_HD constexpr int depth(int bits) { return bits == 8 ? 32 : 64; }
EPILOQ_HD constexpr int lane_bytes(int bits) { return bits == 8 ? 16 : 4 * bits; }

struct TileCoord {
  int row, column;  // within the tile
};

// 8 bits: byte i of a lane is value i: for each 16 columns, for the fragment's half r of K, for both rows, two columns.
// 4 bits: byte b holds values 2 b (low, row g) and 2 b + 1 (high, row g + 8); bytes 0 and 2 of a word are of the half
//         r = 0, 1 and 3 of r = 1, so that (word >> 4 p) & 0x000f000f is register p of the fragment.
// 2 and 3 bits: value 16 b + 2 n + e is pair n of the block b, of whose two columns it is column e.
EPILOQ_HD constexpr TileCoord tile_coord_of(int bits, int lane, int value) {
  int row = value / 2 % 2, column = value / 8 * 16 + value / 4 % 2 * 8 + value % 2;
  if (bits == 4) {
    int const byte = value / 2;
    row = value % 2;
    column = byte / 4 * 16 + byte % 2 * 8 + byte / 2 % 2;
  }
  return {lane / 4 + 8 * row, lane % 4 * 2 + column};
}

// Parameters of a panel and scale group: rows g and g + 8 are neighbours, as a lane needs them.
EPILOQ_HD constexpr int parameter_of(int row) { return row % 8 * 2 + row / 8; }

}  // namespace epiloq::ops::weight_only_mm
