#pragma once

#include <optional>

#include "epiloq/export.h"
#include "epiloq/granularity.h"
#include "epiloq/tensor.h"

namespace epiloq {

// Routing of T tokens to top_k of E experts each, on a CUDA device. Rows are pairs of a token and one of its experts,
// N = T top_k of them.

inline constexpr int kMostExperts = 1024, kMostExpertsPerToken = 32, kMostSortedRows = 16384,
                     kMostGatheredColumns = 8192;

// What logits become before experts are chosen: softmax over all experts, a sigmoid of each, or themselves, with
// softmax over the chosen ones.
enum class ExpertScore { kSoftmax, kSigmoid, kSoftmaxOfChosen };

// Chooses the experts with the largest scores, plus `bias`, and their weights: the scores without the bias, if
// `normalize` divided by their sum plus `epsilon`, times `factor`. In fp32, rounded once. With `groups` above 1 only
// experts of `top_groups` of the equal groups are chosen: those with the largest sum of their `group_scores` largest
// scores.
struct SelectExperts {
  TensorView weights;                // [T, top_k] of logits' type or float32, contiguous; written
  TensorView experts;                // [T, top_k] int64, contiguous; written: by descending score, ties by number
  TensorView logits;                 // [T, E] float32, float16 or bfloat16, rows dense; top_k <= E
  std::optional<TensorView> bias{};  // [E] float32
  ExpertScore score = ExpertScore::kSoftmax;
  bool normalize = false;
  float epsilon = 0, factor = 1;
  int groups = 1, top_groups = 1, group_scores = 1;  // group_scores: 1 or 2
};

// Sorts rows by expert, stably. Rows whose expert is not from 0 to E - 1 come last.
struct SortExpertRows {
  TensorView order;    // [N] int64, contiguous, written: sorted row i is row order[i]
  TensorView tokens;   // [N] int64, contiguous, written: the token of sorted row i
  TensorView places;   // [N] int64, contiguous, written: the inverse of `order`
  TensorView ends;     // [E] int32, contiguous, written: the ends of the experts' sorted rows
  TensorView experts;  // [T, top_k] int64, contiguous; at most kMostSortedRows rows
};

// Sorts rows by expert as SortExpertRows does, and copies each row's token to its sorted place: as it is, or quantised
// as quantize_int8 (symmetric) and quantize_fp8 do. Rows of no expert are not written.
struct GatherExpertRows {
  // [N, H'] of x's type, H' = H, or int8 (tokens) or float8_e4m3fn, H' >= H; rows dense on 16 bytes; written, columns
  // past H with 0
  TensorView rows;
  // float32: [N, 1], or [N, ceil(H / g)], rows or columns dense; written, but not for rows of x's type
  TensorView scale;
  TensorView tokens, places, ends;  // as in SortExpertRows
  // [T, H] float16 or bfloat16, rows dense, H a multiple of 8, at most kMostGatheredColumns
  TensorView x;
  TensorView experts;                             // as in SortExpertRows
  Granularity granularity = Granularity::kToken;  // or kGroup
  int group_size = 128;                           // a power of two from 32 to 256
};

// out[t] = the sum over j of weights[t, j] rows[places[t top_k + j]], in fp32 in order of j, rounded once. Of rows from
// `count` on, which are not read, the product is 0.
struct CombineExpertRows {
  TensorView out;                     // [T, H] of rows' type, contiguous; written
  TensorView rows;                    // [N, H] float32, float16 or bfloat16, dense along H
  TensorView places;                  // [N] int64, contiguous
  TensorView weights;                 // [T, top_k] of rows' type or float32, contiguous
  std::optional<TensorView> count{};  // int32, one element
};

EPILOQ_API void check(SelectExperts const& call);
EPILOQ_API void check(SortExpertRows const& call);
EPILOQ_API void check(GatherExpertRows const& call);
EPILOQ_API void check(CombineExpertRows const& call);
EPILOQ_API void select_experts(SelectExperts const& call, Stream stream);
EPILOQ_API void sort_expert_rows(SortExpertRows const& call, Stream stream);
EPILOQ_API void gather_expert_rows(GatherExpertRows const& call, Stream stream);
EPILOQ_API void combine_expert_rows(CombineExpertRows const& call, Stream stream);

}  // namespace epiloq
