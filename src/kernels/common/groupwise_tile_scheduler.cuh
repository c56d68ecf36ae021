#pragma once

// Which tiles of D a block of a group-wise kernel takes, and whose expert's they are.

#include <cutlass/fast_math.h>

#include <climits>

#include "kernels/common/tile_config.h"
#include "problems/groupwise_gemm.h"

namespace epiloq::gemm {

// One tile of D for a block.
struct GroupwiseTile {
  int first_row, end_row;  // of A and D
  int first_column;
  int expert;
  bool is_split;     // its K, by the two blocks of a cluster
  bool is_paired;    // with the other block's, of the same tokens
  bool is_alone;     // the other block has no tile now, or there is no other block
  bool is_reversed;  // from its last step of K to its first
};

// What of a problem's tiles the host can tell: those along N, of a whole band, and how many are not shared; of pairs
// also the rows of a whole band, 2^band_shift, and whether blocks take their tiles so.
struct GroupwiseTiles {
  int columns;
  cutlass::FastDivmod band;
  int whole;
  int band_shift;
  bool in_pairs;
};

// The tiles of a block, one after the other, in bands of rows so that the tiles in flight share tokens and weights in
// L2. Between two tiles nobody multiplies: but for a last, lower band nothing is divided by what only the device knows.
template <class C>
class GroupwiseScheduler {
 public:
  // The last `shared` tiles are shared by two blocks each.
  static GroupwiseTiles tiles_of(GroupwiseProblem const& p, int shared, bool in_pairs = false) {
    int const columns = ceil_div(p.n, C::kN), tiles = ceil_div(p.m, C::kM) * columns, shift = band_shift(p);
    return {columns, cutlass::FastDivmod(columns << shift), shared == 0 ? INT_MAX : tiles - shared, shift, in_pairs};
  }

  __device__ GroupwiseScheduler(GroupwiseProblem const& p, GroupwiseTiles const& tiles)
      : p_(p), tiles_(tiles), index_(blockIdx.x) {
    enter(0);
  }

  __device__ bool next(GroupwiseTile& tile) {
    if (C::kMaySplitK && index_ >= tiles_.whole) {
      if (!is_split_) index_ = tiles_.whole + blockIdx.x / 2;
      is_split_ = true;
    }
    while (index_ - before_ >= rows_ * tiles_.columns) {
      if (expert_ + 1 >= p_.experts) return false;
      before_ += rows_ * tiles_.columns;
      enter(expert_ + 1);
    }
    int band, within;
    tiles_.band(band, within, index_ - before_);
    int const whole = C::kPairs ? 1 << tiles_.band_shift : kBand, height = min(whole, rows_ - band * whole);
    bool const is_paired = C::kPairs && tiles_.in_pairs && within < tiles_.columns / 2 * 2 * height;
    if (is_paired) within /= 2;
    int column = height == whole ? (C::kPairs ? within >> tiles_.band_shift : within / kBand) : within / height;
    int const row = band * whole + within - column * height;
    if (is_paired) column = 2 * column + index_ % 2;
    bool const is_last = index_ % 2 == 0 && index_ + 1 == rows_ * tiles_.columns;
    tile = {.first_row = begin_ + row * C::kM,
            .end_row = end_,
            .first_column = column * C::kN,
            .expert = expert_,
            .is_split = is_split_,
            .is_paired = is_paired,
            .is_alone = !tiles_.in_pairs || is_last,
            .is_reversed = C::kTurns && is_reversed_};
    is_reversed_ = !is_reversed_;
    index_ += gridDim.x;  // past the last, if that one was shared
    return true;
  }

 private:
  // 8 rows of tiles or, of pairs of few bytes, 16: each band reads all weights, which costs power where L2 has not kept
  // them. By 4096 tokens in tiles of 256, 16 rows take up to 3 % less time where K is 1536, up to 3 more from 8192 on.
  static constexpr int kBand = 8, kBandShift = 3;
  static int band_shift(GroupwiseProblem const& p) {
    constexpr std::int64_t kFewBytes = 6 << 20;
    return C::kPairs && std::int64_t{2 * kBand} * C::kM * p.k <= kFewBytes ? kBandShift + 1 : kBandShift;
  }
  static __host__ __device__ int ceil_div(int a, int b) { return (a + b - 1) / b; }
  __device__ void enter(int expert) {
    expert_ = expert;
    begin_ = 0, end_ = p_.m;
    if (p_.offs != nullptr) {
      begin_ = expert == 0 ? 0 : p_.offs[expert - 1];
      end_ = p_.offs[expert];
    } else if (p_.masked_m != nullptr) {
      begin_ = expert * p_.m;
      end_ = begin_ + p_.masked_m[expert];
    }
    rows_ = ceil_div(end_ - begin_, C::kM);
  }

  GroupwiseProblem const& p_;
  GroupwiseTiles const& tiles_;
  int index_;
  bool is_split_ = false, is_reversed_ = false;
  int expert_ = 0, before_ = 0;
  int begin_ = 0, end_ = 0, rows_ = 0;
};

}  // namespace epiloq::gemm
