#pragma once

// Kernel choice: a pure function of numbers, testable and explainable without a GPU.

#include <string>
#include <vector>

#include "core/target.h"
#include "dispatch/groupwise_mm/tables.h"
#include "dispatch/tuning.h"
#include "epiloq/groupwise_mm.h"

namespace epiloq::ops::groupwise_mm {

enum class Family { kGeneric, kSm90, kSm90ColumnScales, kSm90Transposed, kSm90Int8Rows, kSm90Float8Rows, kMma };

struct Choice {
  Family family;
  int row;          // of the family's table in tables.h
  int split_k = 1;  // CTAs of a cluster that split K
};

// Whether there are kernels for this type of D, as in CMakeLists.txt: D^T is written by an instruction that transposes
// 16-bit numbers.
constexpr bool is_compiled(gemm::Scales scales, DType out) {
  return scales != gemm::Scales::kColumnsOfWholeRows || out != DType::kFloat32;
}

// SM90 with per-row scales whose rows start on 16 bytes, with or without experts.
struct PerRowChoice {
  Choice choice;
  double ns;
};
PerRowChoice choose_per_row(GroupwiseMmProblem const& problem, int sm_count);

// Expected time of a kernel: whole waves of CTA tiles, then a last or only wave with split K.
struct Cost {
  std::int64_t tiles = 0, split_tiles = 0;  // CTA tiles; those whose K is split
  std::int64_t waves = 0;                   // of tiles that are not split
  std::int64_t steps = 0, split_steps = 0;  // K steps of 128 per CTA
  double reduction_ns = 0;                  // of split K
  double ns = 0;                            // infinite if K cannot be split
  // Delay of the next kernel because this one occupies the SMs; decides only whether K is split.
  double late_next_ns = 0;
};
Cost cost_of(Tile const& tile, GroupwiseMmProblem const& problem, int sm_count, int split_k = 1);
// A tile's cost as lines of text, for tuning::explain_terms.
std::string terms_of(Tile const& tile, Cost const& cost, int sm_count);
std::string describe(Choice const& choice);

// For dispatch/tuning.h.
struct Selection {
  using Problem = GroupwiseMmProblem;
  using Choice = groupwise_mm::Choice;
  static constexpr char const* kName = "groupwise_mm";

  static std::string key(Problem const& problem);
  static std::vector<tuning::Timed<Choice>> candidates(Problem const& problem, Target const& target);
  static Choice choose(Problem const& problem, Target const& target);
  static double rank(tuning::Timed<Choice> const& candidate, Problem const& problem, Target const& target);
  static std::string terms(Choice const& choice, Problem const& problem, Target const& target);
};

}  // namespace epiloq::ops::groupwise_mm
