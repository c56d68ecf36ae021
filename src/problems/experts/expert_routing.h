#pragma once

#include <cstdint>

#include "epiloq/expert_routing.h"
#include "problems/quantizers/quantized_rows.h"

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
  std::int64_t *order, *tokens, *places;  // order: or null
  std::int32_t* ends;
  int rows, experts, top_k;
};
void launch_sort(SortProblem const& problem, int device, Stream stream);

// Up to this many rows, each CTA counts its row's place among them, and nothing is sorted beforehand.
inline constexpr int kMostCountedRows = 1024;

struct GatherProblem {
  SortProblem sort;
  QuantizedRows out;  // of unquantised rows: cols, stride_q in elements, q
  void const* x;
  std::int64_t stride_x;
  bool in_vectors;  // rows of x are whole vectors on 16 bytes
};
// `rows`: their type, x's if they are not quantised.
void launch_gather(GatherProblem const& problem, DType x, DType rows, int device, Stream stream);

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
