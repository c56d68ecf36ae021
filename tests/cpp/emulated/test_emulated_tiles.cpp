// Tile schedulers for many sizes. Group-wise kernel: each tile is computed once, pairs by the two CTAs of a cluster.
// Weight-only kernels (tile_bands.cuh): each tile is computed once, band by band.

#include <cuda_runtime_api.h>

#include <map>
#include <random>
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
    GroupwiseScheduler<C> scheduler(p, tiles);
    for (GroupwiseTile tile; scheduler.next(tile);) {
      if (threadIdx.x == 0) taken[blockIdx.x].push_back(tile);
    }
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

// Tiles of experts with random numbers of rows, most of them none: each once, in the order of the experts.
void check_experts(int experts, bool masked, int blocks, std::mt19937& random) {
  GroupwiseProblem p;
  p.n = 2 * Lone::kN, p.k = 256, p.experts = experts;
  std::vector<std::int32_t> counts(experts);
  int rows = 0, wanted = 0;
  for (std::int32_t& count : counts) {
    int const own = random() % 4 == 0 ? static_cast<int>(random() % (2 * Lone::kM + 2)) : 0;
    rows += own, wanted += 2 * ((own + Lone::kM - 1) / Lone::kM);
    count = masked ? own : rows;
  }
  p.m = masked ? 2 * Lone::kM + 2 : rows;
  (masked ? p.masked_m : p.offs) = counts.data();
  auto const taken = tiles_of<Lone>(p, blocks, false);
  std::set<std::pair<int, int>> places;
  int found = 0;
  for (auto const& tiles : taken) {
    int last = 0;
    for (GroupwiseTile const& tile : tiles) {
      int const begin = masked ? tile.expert * p.m : tile.expert == 0 ? 0 : counts[tile.expert - 1];
      int const end = masked ? begin + counts[tile.expert] : counts[tile.expert];
      CHECK_EQUAL(tile.end_row, end);
      CHECK(tile.first_row >= begin && tile.first_row < end && (tile.first_row - begin) % Lone::kM == 0);
      CHECK(tile.expert >= last);
      last = tile.expert;
      places.insert({tile.first_row, tile.first_column});
      ++found;
    }
  }
  CHECK_EQUAL(found, wanted);
  CHECK_EQUAL(static_cast<int>(places.size()), wanted);
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
  std::mt19937 random(1);
  for (int experts : {1, 2, 31, 32, 33, 64, 200}) {
    for (int blocks : {1, 5, 132}) {
      check_experts(experts, false, blocks, random);
      check_experts(experts, true, blocks, random);
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
