#pragma once

#include <optional>

#include "epiloq/export.h"
#include "epiloq/tensor.h"

namespace epiloq {

// Attention of one new token per sequence over a key-value cache whose heads several query heads share:
// out[b, h] = softmax over t of (scale q[b, h] . k[b, h / G, t]) applied to v[b, h / G, t], with G = H / H_kv, in fp32.
// Keys and values have the query's type, or 8 bits with a scale per token and head: int8, or float8 (E4M3) as uint8.
// They are read as stored, once for all query heads that share them.
// With sinks the softmax of head h has one more score, sinks[h], without a value.
struct DecodeAttention {
  TensorView out;                         // [B, H, D] of the query's type, contiguous
  TensorView query;                       // [B, H, D] float16 or bfloat16, dense along D, like key and value
  TensorView key;                         // [B, H_kv, T, D]
  TensorView value;                       // [B, H_kv, T, D] of key's type
  std::optional<TensorView> mask{};       // bool as uint8 [B or 1, T]: tokens that count; all if there is none
  std::optional<TensorView> key_scale{};  // [B, H_kv, T] of the query's type, dense along T; with 8 bits only
  std::optional<TensorView> value_scale{};
  float scale = 1;
  std::optional<TensorView> workspace{};  // float32, contiguous; see decode_attention_workspace
  std::optional<TensorView> sinks{};      // [H] of the query's type, dense
};

EPILOQ_API void check(DecodeAttention const& call);

struct DecodeAttentionSizes {
  std::int64_t batches, heads, key_heads, tokens, width;  // B, H, H_kv, T, D
};

// Floats of workspace with which a call on that CUDA device can share a long context among more CTAs than a cluster
// has. 0 if it would not be used. Set batch invariance as for the call.
EPILOQ_API std::int64_t decode_attention_workspace(DecodeAttentionSizes const& sizes, int device);

// Launches and returns true; or does nothing and returns false where there is no kernel: a head width other than 64,
// 128 or 256, float32, rows that do not start on 16 bytes, a device before SM80, the CPU.
EPILOQ_API bool decode_attention(DecodeAttention const& call, Stream stream);

// Rotary embedding as in Llama (coordinates i and i + D / 2 of a head are rotated together), and a cache's
// update, in one launch: query = heads[…, :H] rotated; keys, rotated, and values are written to their caches from
// `position` (0 if not given) on, and T is added to `position`. Each product and each sum is rounded to the type, as
// torch does. With norms, query and key heads are first divided by sqrt(mean square + epsilon) and multiplied by the
// norm's D factors, in fp32, and rounded. Caches of 8 bits, as of DecodeAttention, hold a rounded head divided by its
// scale, which is its largest magnitude divided by 127 (int8; half to even) or 448 (float8), rounded to the type and at
// least its smallest normal number (float16: rounded up, at least 2^-24). A token past the end of a cache is a CUDA
// error. On a CUDA device.
struct RotateAndStore {
  TensorView query;  // [B, T, H, D] float16, bfloat16 or float32, contiguous; written
  TensorView heads;  // [B, T, H + 2 H_kv, D] of that type, dense along D
  TensorView cos;    // [B or 1, T, D] of that type, contiguous; or [B or 1, T, D / 2], the same for both halves
  TensorView sin;
  TensorView key_cache;  // [B, H_kv, L, D] of that type, int8 or uint8, dense along D; written
  TensorView value_cache;
  std::optional<TensorView> position{};    // int64, one element; written
  std::optional<TensorView> query_norm{};  // [D] of that type or float32, dense
  std::optional<TensorView> key_norm{};    // as query_norm, with which it is given
  float epsilon = 0;
  std::optional<TensorView> key_scale{};  // [B, H_kv, L] of heads' type, dense along L, with 8 bits only; written
  std::optional<TensorView> value_scale{};
};

EPILOQ_API void check(RotateAndStore const& call);
EPILOQ_API void rotate_and_store(RotateAndStore const& call, Stream stream);

}  // namespace epiloq
