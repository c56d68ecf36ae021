#pragma once

// Which kernel serves a problem: a pure function of numbers, so that it can be tested and explained without a GPU.

#include <string>

#include "dispatch/groupwise_mm/tables.h"
#include "epiloq/groupwise_mm.h"

namespace epiloq::ops::groupwise_mm {

enum class Family { kGeneric, kSm90, kSm90ColumnScales, kSm90Int8Rows, kSm90Float8Rows, kMma };

struct Choice {
  Family family;
  int row;          // of the family's table in tables.h
  int split_k = 1;  // that share K
};

Choice choose(GroupwiseMmProblem const& problem, Arch arch, int sm_count);
// On SM90 with scales of whole rows that begin at multiples of 16 bytes, with experts or without; and what is expected
// of a tile of any kernel, by its waves of the SMs, of which the last, or the only one, may be of blocks that share K.
// (What the next kernel loses is not in it.)
struct WholeRowsChoice {
  Choice choice;
  double ns;
};
WholeRowsChoice choose_whole_rows(GroupwiseMmProblem const& problem, int sm_count);
double expected_ns(Tile const& tile, GroupwiseMmProblem const& problem, int sm_count, int split_k = 1);
std::string describe(Choice const& choice);

}  // namespace epiloq::ops::groupwise_mm
