// Tile schedulers for many sizes. Group-wise kernel: each tile is computed once, pairs by the two CTAs of a cluster.
// Weight-only kernels (tile_bands.cuh): each tile is computed once, band by band.

#include <cuda_runtime_api.h>

#include <map>
#include <set>
#include <utility>
#include <vector>

#include "check.h"
#include "kernels/common/tile_bands.cuh"
#include "kernels/sm90/groupwise_gemm.cuh"

using namespace epiloq::gemm;

namespace {

using Pairs = Groupwise<2, 1, 128, 2, Scales::kBlocks, cutlass::float_e4m3_t, __nv_bfloat16>;
using Lone = Groupwise<2, 1, 128, 1, Scales::kBlocks, cutlass::float_e4m3_t, __nv_bfloat16>;

// The tiles of each CTA, in their order.
template <class C>
std::vector<std::vector<GroupwiseTile>> tiles_of(GroupwiseProblem const& p, int blocks, bool multicast) {
  auto const tiles = GroupwiseScheduler<C>::tiles_of(p, 0, multicast);
  std::vector<std::vector<GroupwiseTile>> taken(blocks);
  emulated::run({static_cast<unsigned>(blocks), 32, multicast ? 2u : 1u, 16}, [&] {
    if (threadIdx.x != 0) return;
    GroupwiseScheduler<C> scheduler(p, tiles);
    for (GroupwiseTile tile; scheduler.next(tile);) taken[blockIdx.x].push_back(tile);
  });
  return taken;
}

template <class C>
void check(int rows, int columns, int depth, int blocks, bool multicast) {
  GroupwiseProblem p;
  p.m = rows * C::kM - 1, p.n = columns * C::kN - 1, p.k = depth, p.experts = 1;
  auto const taken = tiles_of<C>(p, blocks, multicast);
  std::map<std::pair<int, int>, int> times;
  for (int block = 0; block < blocks; ++block) {
    for (std::size_t i = 0; i < taken[block].size(); ++i) {
      GroupwiseTile const& tile = taken[block][i];
      ++times[{tile.first_row / C::kM, tile.first_column / C::kN}];
      CHECK_EQUAL(tile.first_row % C::kM, 0);
      CHECK_EQUAL(tile.first_column % C::kN, 0);
      CHECK_EQUAL(tile.is_reversed, i % 2 == 1);  // in all CTAs at the same time
      if (!multicast) continue;
      auto const& partners = taken[block ^ 1];
      bool const has_partner = i < partners.size();
      CHECK_EQUAL(tile.is_alone, !has_partner);
      if (!tile.is_multicast) continue;
      CHECK(has_partner && partners[i].is_multicast);
      CHECK_EQUAL(partners[i].first_row, tile.first_row);
      CHECK_EQUAL(partners[i].first_column, tile.first_column + (block % 2 == 0 ? C::kN : -C::kN));
    }
  }
  CHECK_EQUAL(static_cast<int>(times.size()), rows * columns);
  for (auto const& [place, count] : times) {
    CHECK_EQUAL(count, 1);
    CHECK(place.first < rows && place.second < columns);
  }
}

// Each tile once: all rows of weights for a band of 1024 tokens before the next band; within it, tiles of the same rows
// follow each other.
template <int kTokens>
void check_bands(int token_tiles, int row_tiles) {
  constexpr int kBand = 1024 / kTokens;
  std::set<std::pair<int, int>> places;
  TilePlace last{0, 0};
  for (int tile = 0; tile < token_tiles * row_tiles; ++tile) {
    TilePlace const place = tile_in_bands<kTokens>(tile, token_tiles, row_tiles);
    CHECK(place.token_tile >= 0 && place.token_tile < token_tiles);
    CHECK(place.row_tile >= 0 && place.row_tile < row_tiles);
    places.insert({place.token_tile, place.row_tile});
    int const band = place.token_tile / kBand, last_band = last.token_tile / kBand;
    CHECK(band >= last_band && (band > last_band || place.row_tile >= last.row_tile));
    last = place;
  }
  CHECK_EQUAL(static_cast<int>(places.size()), token_tiles * row_tiles);
}

}  // namespace

int main() {
  for (int token_tiles : {1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 33}) {
    for (int row_tiles : {1, 2, 7, 40}) {
      check_bands<64>(token_tiles, row_tiles);
      check_bands<128>(token_tiles, row_tiles);
      check_bands<256>(token_tiles, row_tiles);
    }
  }
  constexpr int kShort = 1536, kLong = 4096;  // bands of 16 rows of pairs, and of 8
  for (int rows : {1, 2, 7, 8, 9, 15, 16, 17, 33}) {
    for (int columns : {1, 2, 3, 16, 31}) {
      for (int blocks : {2, 6, 132}) {
        for (int depth : {kShort, kLong}) {
          check<Pairs>(rows, columns, depth, blocks, true);
          check<Lone>(rows, columns, depth, blocks, false);
        }
      }
    }
  }
  return test::failures != 0;
}
