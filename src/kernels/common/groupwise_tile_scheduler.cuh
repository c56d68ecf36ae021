#pragma once

// Tile scheduler of the groupwise GEMM kernels: which tiles of D a CTA computes, and for which expert.

#include <cutlass/fast_math.h>

#include <climits>

#include "kernels/common/tile_config.h"
#include "problems/groupwise_gemm.h"

namespace epiloq::gemm {

// One tile of D.
struct GroupwiseTile {
  int first_row, end_row;  // of A and D
  int first_column;
  int expert;
  bool is_split;      // its K, between the two CTAs of a cluster
  bool is_multicast;  // with the tile of the cluster's other CTA, which has the same tokens
  bool is_alone;      // the other CTA has no tile now, or there is none
  bool is_reversed;   // K runs from the last step to the first
};

// Known on the host: the tiles along N, those of a whole band, and the first that is split; with multicast also the
// rows of a whole band, 2^band_shift, and whether it is used.
struct GroupwiseTiles {
  int columns;
  cutlass::FastDivmod band;
  int first_split;
  int band_shift;
  bool multicast;
};

// A CTA's tiles in order, in bands of rows so that the tiles in flight share tokens and weights in L2. Tensor cores
// idle between two tiles, so except for a last, lower band there is no division by values known only on the device.
// With several experts, `next` is called by whole warps.
template <class C>
class GroupwiseScheduler {
 public:
  // The last `split_count` tiles are each split between two CTAs.
  static GroupwiseTiles tiles_of(GroupwiseProblem const& p, int split_count, bool multicast = false) {
    int const columns = ceil_div(p.n, C::kN), tiles = ceil_div(p.m, C::kM) * columns, shift = band_shift(p);
    return {columns, cutlass::FastDivmod(columns << shift), split_count == 0 ? INT_MAX : tiles - split_count, shift,
            multicast};
  }

  __device__ GroupwiseScheduler(GroupwiseProblem const& p, GroupwiseTiles const& tiles)
      : p_(p), tiles_(tiles), index_(blockIdx.x) {
    Rows const first = rows_of(0);
    begin_ = first.begin, end_ = first.end, rows_ = first.tiles();
  }

  __device__ bool next(GroupwiseTile& tile) {
    if (C::kMaySplitK && index_ >= tiles_.first_split) {
      if (!is_split_) index_ = tiles_.first_split + blockIdx.x / 2;
      is_split_ = true;
    }
    if (index_ - before_ >= rows_ * tiles_.columns && !find_expert()) return false;
    int band, within;
    tiles_.band(band, within, index_ - before_);
    int const band_rows = C::kMulticast ? 1 << tiles_.band_shift : kBand,
              height = min(band_rows, rows_ - band * band_rows);
    bool const is_multicast = C::kMulticast && tiles_.multicast && within < tiles_.columns / 2 * 2 * height;
    if (is_multicast) within /= 2;
    int column = height == band_rows ? (C::kMulticast ? within >> tiles_.band_shift : within / kBand) : within / height;
    int const row = band * band_rows + within - column * height;
    if (is_multicast) column = 2 * column + index_ % 2;
    bool const is_last = index_ % 2 == 0 && index_ + 1 == rows_ * tiles_.columns;
    tile = {.first_row = begin_ + row * C::kM,
            .end_row = end_,
            .first_column = column * C::kN,
            .expert = expert_,
            .is_split = is_split_,
            .is_multicast = is_multicast,
            .is_alone = !tiles_.multicast || is_last,
            .is_reversed = C::kAlternatesK && is_reversed_};
    is_reversed_ = !is_reversed_;
    index_ += gridDim.x;  // past the last tile, if that one was split
    return true;
  }

 private:
  // Rows of tiles per band: each band reads all weights, so taller bands save power where L2 does not hold the weights.
  static constexpr int kBand = 8, kBandShift = 3;
  static int band_shift(GroupwiseProblem const& p) {
    constexpr std::int64_t kFewBytes = 6 << 20;
    return C::kMulticast && std::int64_t{2 * kBand} * C::kM * p.k <= kFewBytes ? kBandShift + 1 : kBandShift;
  }
  static __host__ __device__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

  // An expert's rows of A.
  struct Rows {
    int begin, end;

    __device__ int tiles() const { return ceil_div(max(end - begin, 0), C::kM); }
  };
  __device__ Rows rows_of(int expert) const {
    if (p_.offs != nullptr) return {expert == 0 ? 0 : p_.offs[expert - 1], p_.offs[expert]};
    if (p_.masked_m != nullptr) return {expert * p_.m, expert * p_.m + p_.masked_m[expert]};
    return {0, p_.m};
  }

  // Enters the expert that tile `index_` belongs to, a later one; false if there are no more tiles. Lanes count the
  // tiles of an expert each, since only a few of many experts may have rows.
  __device__ bool find_expert() {
    constexpr int kWarp = 32;
    if (p_.experts == 1) return false;
    int const lane = threadIdx.x % kWarp;
    for (; chunk_ < p_.experts; chunk_ += kWarp) {
      Rows const rows = chunk_ + lane < p_.experts ? rows_of(chunk_ + lane) : Rows{0, 0};
      int const own = rows.tiles() * tiles_.columns;
      int up_to = own;  // tiles of the chunk's experts up to this one
#pragma unroll
      for (int offset = 1; offset < kWarp; offset *= 2) {
        int const below = __shfl_up_sync(~0u, up_to, offset);
        if (lane >= offset) up_to += below;
      }
      unsigned const later = __ballot_sync(~0u, before_chunk_ + up_to > index_);
      if (later != 0) {
        int const found = __ffs(static_cast<int>(later)) - 1;
        expert_ = chunk_ + found;
        before_ = before_chunk_ + __shfl_sync(~0u, up_to - own, found);
        begin_ = __shfl_sync(~0u, rows.begin, found), end_ = __shfl_sync(~0u, rows.end, found);
        rows_ = Rows{begin_, end_}.tiles();
        return true;
      }
      before_chunk_ += __shfl_sync(~0u, up_to, kWarp - 1);
    }
    return false;
  }

  GroupwiseProblem const& p_;
  GroupwiseTiles const& tiles_;
  int index_;
  bool is_split_ = false, is_reversed_ = false;
  int expert_ = 0, before_ = 0;
  int begin_, end_, rows_;
  int chunk_ = 0, before_chunk_ = 0;  // first of 32 experts, and tiles of all before it
};

}  // namespace epiloq::gemm
