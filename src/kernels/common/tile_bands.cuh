#pragma once

// Order of the tiles of products whose rows are weights and whose columns are tokens.

namespace epiloq::gemm {

struct TilePlace {
  int token_tile, row_tile;
};

// Where a tile of kTokens tokens lies. A band of tokens is multiplied by all rows before the next band, and within it
// tiles of the same rows are neighbours. So the tiles that a GPU computes at a time have about as many bytes of tokens
// as of weights, of which L2 then loads the fewest. Without kInBands all tokens are one band.
template <int kTokens, bool kInBands = true>
__device__ __forceinline__ TilePlace tile_in_bands(int tile, int token_tiles, int row_tiles) {
  constexpr int kBandTokens = 1024, kBand = kBandTokens / kTokens;  // tokens and tiles of a band
  int wide = token_tiles, first = 0;
  if (kInBands && wide > kBand) {
    int const band = tile / (kBand * row_tiles);
    first = band * kBand;
    tile -= first * row_tiles;
    wide = min(kBand, wide - first);
  }
  // Avoids the division, which takes as long as the rest of a prologue; few tokens are one tile.
  int const row_tile = wide == 1 ? tile : tile / wide;
  return {first + tile - row_tile * wide, row_tile};
}

}  // namespace epiloq::gemm
