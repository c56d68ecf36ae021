#pragma once

// Tile order of the GEMMs that compute D^T: tile rows are weight rows, tile columns are tokens.

namespace epiloq::gemm {

struct TilePlace {
  int token_tile, row_tile;
};

// The position of tile number `tile`, of kTokens tokens. All rows of a band of tokens are computed before the next
// band, and tiles of the same rows are consecutive. A wave of CTAs then reads about as many bytes of tokens as of
// weights, which minimises L2 misses. Without kInBands all tokens form one band.
template <int kTokens, bool kInBands = true>
__device__ __forceinline__ TilePlace tile_in_bands(int tile, int token_tiles, int row_tiles) {
  constexpr int kBandTokens = 1024, kBand = kBandTokens / kTokens;  // tokens and tiles per band
  int wide = token_tiles, first = 0;
  if (kInBands && wide > kBand) {
    int const band = tile / (kBand * row_tiles);
    first = band * kBand;
    tile -= first * row_tiles;
    wide = min(kBand, wide - first);
  }
  // At small M there is one token tile: skip the division, which takes as long as the rest of a prologue.
  int const row_tile = wide == 1 ? tile : tile / wide;
  return {first + tile - row_tile * wide, row_tile};
}

}  // namespace epiloq::gemm
