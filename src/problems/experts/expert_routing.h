#pragma once

#include <cstdint>

#include "epiloq/expert_routing.h"

namespace epiloq::ops::expert_routing {

struct SelectProblem {
  void const* logits;
  float const* bias;  // or null
  void* weights;
  std::int64_t* chosen;
  std::int64_t stride_logits;
  int tokens, experts, top_k;
  ExpertScore score;
  bool normalize;
  float epsilon, factor;
  int groups, top_groups, group_scores;
};
void launch_select(SelectProblem const& problem, DType logits, DType weights, int device, Stream stream);

struct SortProblem {
  std::int64_t const* expert_of_row;
  std::int64_t *order, *tokens, *places;
  std::int32_t* ends;
  int rows, experts, top_k;
};
void launch_sort(SortProblem const& problem, int device, Stream stream);

struct CombineProblem {
  void const* rows;
  std::int64_t const* places;
  void const* weights;
  std::int32_t const* count;  // or null
  void* out;
  std::int64_t stride_rows;
  int tokens, top_k, width;
};
// `in_vectors`: rows and out are whole vectors on 16 bytes.
void launch_combine(CombineProblem const& problem, bool in_vectors, DType rows, DType weights, int device,
                    Stream stream);

}  // namespace epiloq::ops::expert_routing
