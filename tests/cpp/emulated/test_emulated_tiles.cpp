// Who takes which tile of the group-wise kernel, for many sizes: each tile once, pairs by the two blocks of a cluster.

#include <map>
#include <utility>
#include <vector>

#include "check.h"
#include "kernels/sm90/groupwise_gemm.cuh"

using namespace epiloq::gemm;

namespace {

using Pairs = Groupwise<2, 1, 128, 2, Scales::kBlocks, cutlass::float_e4m3_t, __nv_bfloat16>;
using Lone = Groupwise<2, 1, 128, 1, Scales::kBlocks, cutlass::float_e4m3_t, __nv_bfloat16>;

// The tiles of each block, in their order.
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
      CHECK_EQUAL(tile.is_reversed, i % 2 == 1);  // of all blocks at the same time
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

}  // namespace

int main() {
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
