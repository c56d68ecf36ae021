#pragma once

#include <cstdint>

#include "epiloq/tensor.h"

namespace epiloq::ops::decode_attention {

// Distances in elements from one batch, head and token to the next.
struct Strides {
  std::int64_t batch, head, token;
};

struct Problem {
  void const *query, *key, *value;
  std::uint8_t const* mask;  // null: every token counts
  void const *key_scale, *value_scale;
  void const* sinks;  // of the query's type, one per head; null: none
  void* out;
  float* workspace;  // partial results, if the plan splits the cache
  Strides of_query, of_key, of_value, of_key_scale, of_value_scale;
  std::int64_t mask_batch;
  int batches, key_heads, tokens, width;
  int group;  // query heads that share a key head
  float scale;
};

// Element type of keys and values.
enum class Kind { kHalf, kInt8, kFloat8 };

// Query heads per CTA, at most.
inline constexpr int kHeadsPerCta = 8;
// Floats of the workspace for each head and CTA of its split, besides D: what the numerators are relative to.
inline constexpr int kStateFloats = 4;

// How many CTAs share the tokens of a key head, and whether a second kernel merges their results, by way of the
// workspace; otherwise they are a cluster.
struct Plan {
  int split;
  bool has_workspace;
};

// Resources of the device and the call that a plan may use.
struct Resources {
  int sm_count;
  bool has_clusters, has_workspace;
};

Plan plan_of(Problem const& problem, Resources const& resources);
bool has_kernel(int width);

void launch(Problem const& problem, DType query, Kind kind, int split, int device, Stream stream);

// Query, key and value heads side by side; what normed query and key heads are multiplied by, of the heads' type or
// float32, or null; the caches that keys and values go to, from `position` on, which is
// advanced by the tokens, or from the start where it is null. At most 2^31 tokens in a cache.
struct RotateProblem {
  void const *from, *cos, *sin;
  std::int64_t* position;
  void *query, *key, *value;
  Strides of_from, of_key, of_value;
  std::int64_t angle_batch, length;
  int angle_width;  // width, or half of it: then both halves of a head have the same angles
  int batches, tokens, heads, key_heads, width;
  void const *query_norm, *key_norm;
  bool has_float_norms;
  float epsilon;
  Kind kind;  // of the caches
  void *key_scale, *value_scale;
  Strides of_key_scale, of_value_scale;
};
void launch_rotate(RotateProblem const& problem, DType dtype, int device, Stream stream);

}  // namespace epiloq::ops::decode_attention
