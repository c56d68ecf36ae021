#pragma once

#include <string>

#include "epiloq/weight_only_mm.h"
#include "problems/weight_only.h"

namespace epiloq::ops::grouped_packed_mm {

// Products of experts whose weights are stacked.
struct Problem {
  weight_only_mm::Problem product;  // of the first expert; m: rows of x, of one expert if they are masked
  int experts;
  int const* counts;     // null: all rows are the first expert's
  bool masked;           // counts: numbers of rows, and experts are m rows apart; otherwise the ends of experts' rows
  bool batch_invariant;  // batch_invariant.h; the kernels do not read it
  std::int64_t stride_x_expert, stride_out_expert;  // if they are masked
  float const* factor;                              // of each expert's sums; null: 1
};

// One matrix of FP4 weights, without counts.
void multiply_on_host(Problem const& problem, WeightFormat format, DType x, int threads);
std::string describe_on_host(Problem const& problem, WeightFormat format, DType x);

}  // namespace epiloq::ops::grouped_packed_mm
