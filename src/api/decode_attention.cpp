#include "epiloq/decode_attention.h"

#include <algorithm>

#include "core/checks.h"
#include "dispatch/arch.h"
#include "epiloq/batch_invariant.h"
#include "epiloq/device.h"
#include "problems/decode_attention.h"

namespace epiloq {
namespace {

using ops::decode_attention::Kind;
using ops::decode_attention::Plan;
using ops::decode_attention::Problem;
using ops::decode_attention::Resources;
using ops::decode_attention::Strides;

constexpr std::int64_t kMostTokens = (std::int64_t{1} << 31) - 1024, kMostOnGrid = 65535;

bool fits_grid(DecodeAttentionSizes const& sizes) {
  return sizes.tokens <= kMostTokens && sizes.heads <= kMostOnGrid && sizes.batches <= kMostOnGrid;
}

void expect_shape(Checker const& check, char const* argument, TensorView const& view,
                  std::initializer_list<std::int64_t> shape) {
  TensorView const expected(nullptr, view.dtype, view.device, shape);
  bool fits = view.rank == expected.rank;
  for (int i = 0; fits && i < view.rank; ++i) fits = view.shape[i] == expected.shape[i];
  if (!fits) check.fail(argument, "expected ", describe(expected), ", got ", describe(view));
  if (view.size(-1) > 1 && view.stride(-1) != 1)
    check.fail(argument, "expected a dense last dimension, got ", describe(view));
}

Strides strides_of(TensorView const& view) {
  return {view.strides[0], view.strides[1], view.rank > 3 ? view.strides[2] : 1};
}

// Scales of keys and values [B, H, T, D], of that type.
template <class Call>
void check_scales(Call const& call, Checker const& check, TensorView const& keys, DType dtype) {
  bool const has_bytes = keys.dtype != dtype;
  for (auto const& [argument, scale] : {std::pair("key_scale", &call.key_scale), {"value_scale", &call.value_scale}}) {
    if (scale->has_value() != has_bytes) {
      check.fail(argument, has_bytes ? "expected scales with 8-bit keys and values, got none"
                                     : "expected none unless keys and values have 8 bits, got scales");
    }
    if (!has_bytes) continue;
    check.tensor(argument, **scale, {dtype});
    expect_shape(check, argument, **scale, {keys.shape[0], keys.shape[1], keys.shape[2]});
  }
}

Kind kind_of(DType keys) {
  return keys == DType::kInt8 ? Kind::kInt8 : keys == DType::kUInt8 ? Kind::kFloat8 : Kind::kHalf;
}

Problem checked(DecodeAttention const& call) {
  Checker const check("decode_attention", call.query.device);
  check.tensor("query", call.query, kFloats);
  check.tensor("key", call.key, {call.query.dtype, DType::kInt8, DType::kUInt8});
  check.tensor("value", call.value, {call.key.dtype});
  check.tensor("out", call.out, {call.query.dtype});
  if (call.key.rank != 4) check.fail("key", "expected [B, H, T, D], got ", describe(call.key));
  std::int64_t const batches = call.key.shape[0], key_heads = call.key.shape[1], tokens = call.key.shape[2],
                     width = call.key.shape[3];
  if (call.query.rank != 3) check.fail("query", "expected [B, H, D], got ", describe(call.query));
  std::int64_t const heads = call.query.shape[1];
  if (key_heads < 1 || heads % key_heads != 0) {
    check.fail("query", "expected a multiple of the ", key_heads, " heads of key, got ", describe(call.query));
  }
  expect_shape(check, "query", call.query, {batches, heads, width});
  expect_shape(check, "key", call.key, {batches, key_heads, tokens, width});
  expect_shape(check, "value", call.value, {batches, key_heads, tokens, width});
  expect_shape(check, "out", call.out, {batches, heads, width});
  check.contiguous("out", call.out);
  if (!fits_grid({batches, heads, key_heads, tokens, width})) {
    check.fail("key", "expected at most ", kMostTokens, " tokens, and ", kMostOnGrid, " heads and sequences, got ",
               describe(call.key));
  }
  check_scales(call, check, call.key, call.query.dtype);
  if (call.sinks) {
    check.tensor("sinks", *call.sinks, {call.query.dtype});
    check.vector("sinks", *call.sinks, heads);
    check.apart("out", call.out, "sinks", *call.sinks);
  }
  if (call.workspace) {
    check.tensor("workspace", *call.workspace, {DType::kFloat32});
    check.contiguous("workspace", *call.workspace);
    if (!is_aligned(call.workspace->data)) check.fail("workspace", "expected memory aligned to 16 bytes");
  }
  Problem p{};
  if (call.mask) {
    check.tensor("mask", *call.mask, {DType::kUInt8});
    bool const is_shared = call.mask->rank == 2 && call.mask->shape[0] == 1;
    expect_shape(check, "mask", *call.mask, {is_shared ? 1 : batches, tokens});
    p.mask = call.mask->as<std::uint8_t>();
    p.mask_batch = is_shared ? 0 : call.mask->strides[0];
    check.apart("out", call.out, "mask", *call.mask);
  }
  check.apart("out", call.out, "query", call.query);
  check.apart("out", call.out, "key", call.key);
  check.apart("out", call.out, "value", call.value);
  p.query = call.query.data, p.key = call.key.data, p.value = call.value.data, p.out = call.out.data;
  p.sinks = call.sinks ? call.sinks->data : nullptr;
  p.of_query = strides_of(call.query), p.of_key = strides_of(call.key), p.of_value = strides_of(call.value);
  if (call.key_scale) p.key_scale = call.key_scale->data, p.of_key_scale = strides_of(*call.key_scale);
  if (call.value_scale) p.value_scale = call.value_scale->data, p.of_value_scale = strides_of(*call.value_scale);
  p.batches = static_cast<int>(batches), p.key_heads = static_cast<int>(key_heads);
  p.tokens = static_cast<int>(tokens), p.width = static_cast<int>(width);
  p.group = static_cast<int>(heads / key_heads);
  p.scale = call.scale;
  return p;
}

using ops::decode_attention::RotateProblem;

RotateProblem checked(RotateAndStore const& call) {
  Checker const check("rotate_and_store", call.heads.device);
  DType const dtype = call.heads.dtype;
  check.tensor("heads", call.heads, kFloats);
  if (call.position) {
    check.tensor("position", *call.position, {DType::kInt64});
    check.scalar("position", *call.position);
  }
  if (call.heads.rank != 4 || call.key_cache.rank != 4 || call.query.rank != 4) {
    check.fail("heads", "expected query, heads and caches of four dimensions, got ", describe(call.query), ", ",
               describe(call.heads), " and ", describe(call.key_cache));
  }
  std::int64_t const batches = call.heads.shape[0], tokens = call.heads.shape[1], width = call.heads.shape[3],
                     heads = call.query.shape[2], key_heads = call.key_cache.shape[1], length = call.key_cache.shape[2];
  if (width % 2 != 0) check.fail("heads", "expected an even width, got ", describe(call.heads));
  if (batches * tokens > kMostTokens || (heads + 2 * key_heads) * width > kMostTokens) {
    check.fail("heads", "expected fewer tokens and heads, got ", describe(call.heads));
  }
  if (tokens > length) {
    check.fail("heads", "expected at most the ", length, " tokens of key_cache, got ", describe(call.heads));
  }
  if (length > kMostTokens) {
    check.fail("key_cache", "expected at most ", kMostTokens, " tokens, got ", describe(call.key_cache));
  }
  TensorView const* const views[] = {&call.query, &call.key_cache, &call.value_cache, &call.cos, &call.sin};
  char const* const names[] = {"query", "key_cache", "value_cache", "cos", "sin"};
  std::int64_t const angles = call.cos.rank == 3 && call.cos.shape[0] == 1 ? 1 : batches;
  std::int64_t const angle_width = call.cos.rank == 3 && call.cos.shape[2] * 2 == width ? width / 2 : width;
  std::initializer_list<std::int64_t> const shapes[] = {{batches, tokens, heads, width},
                                                        {batches, key_heads, length, width},
                                                        {batches, key_heads, length, width},
                                                        {angles, tokens, angle_width},
                                                        {angles, tokens, angle_width}};
  expect_shape(check, "heads", call.heads, {batches, tokens, heads + 2 * key_heads, width});
  check.tensor("key_cache", call.key_cache, {dtype, DType::kInt8, DType::kUInt8});
  check.tensor("value_cache", call.value_cache, {call.key_cache.dtype});
  for (int i = 0; i < 5; ++i) {
    bool const is_cache = i == 1 || i == 2;
    if (!is_cache) check.tensor(names[i], *views[i], {dtype});
    expect_shape(check, names[i], *views[i], shapes[i]);
    if (i < 3) check.apart(names[i], *views[i], "heads", call.heads);
  }
  check_scales(call, check, call.key_cache, dtype);
  if (call.key_scale && call.value_scale) check.apart("key_scale", *call.key_scale, "value_scale", *call.value_scale);
  bool const has_norms = call.query_norm.has_value();
  if (has_norms != call.key_norm.has_value()) check.fail("key_norm", "expected both norms or none, got one");
  if (has_norms) {
    check.tensor("query_norm", *call.query_norm, {dtype, DType::kFloat32});
    check.vector("query_norm", *call.query_norm, width);
    check.tensor("key_norm", *call.key_norm, {call.query_norm->dtype});
    check.vector("key_norm", *call.key_norm, width);
  }
  check.contiguous("query", call.query);
  check.contiguous("cos", call.cos);
  check.contiguous("sin", call.sin);
  check.apart("key_cache", call.key_cache, "value_cache", call.value_cache);
  // Strides of heads: tokens are the second dimension.
  Strides const of_heads{call.heads.strides[0], call.heads.strides[2], call.heads.strides[1]};
  auto const data_of = [](std::optional<TensorView> const& view) { return view ? view->data : nullptr; };
  auto const of_scales = [](std::optional<TensorView> const& view) { return view ? strides_of(*view) : Strides{}; };
  return {call.heads.data,
          call.cos.data,
          call.sin.data,
          call.position ? static_cast<std::int64_t*>(call.position->data) : nullptr,
          call.query.data,
          call.key_cache.data,
          call.value_cache.data,
          of_heads,
          strides_of(call.key_cache),
          strides_of(call.value_cache),
          angles == 1 ? 0 : tokens * angle_width,
          length,
          static_cast<int>(angle_width),
          static_cast<int>(batches),
          static_cast<int>(tokens),
          static_cast<int>(heads),
          static_cast<int>(key_heads),
          static_cast<int>(width),
          has_norms ? call.query_norm->data : nullptr,
          has_norms ? call.key_norm->data : nullptr,
          has_norms && call.query_norm->dtype == DType::kFloat32,
          call.epsilon,
          kind_of(call.key_cache.dtype),
          data_of(call.key_scale),
          data_of(call.value_scale),
          of_scales(call.key_scale),
          of_scales(call.value_scale)};
}

bool starts_on_16_bytes(void const* data, Strides const& strides, DType dtype) {
  auto const whole = [&](std::int64_t stride) { return stride * static_cast<std::int64_t>(size_of(dtype)) % 16 == 0; };
  return is_aligned(data) && whole(strides.batch) && whole(strides.head) && whole(strides.token);
}

constexpr std::int64_t workspace_floats(Problem const& p, int split) {
  return std::int64_t{p.batches} * p.key_heads * p.group * split * (p.width + ops::decode_attention::kStateFloats);
}

// The kernel's plan, with a workspace or without; nothing if the device has no kernel.
std::optional<Plan> plan_on(int device, Problem problem, bool has_workspace) {
  std::optional<Target> const target = find_target(KernelSet::kDecodeAttention, device);
  if (!target) return std::nullopt;
  Resources const resources{target->sm_count, target->arch == Arch::kSm90, has_workspace};
  if (batch_invariant()) problem.batches = 1;  // the order of sums must not depend on how many there are
  return ops::decode_attention::plan_of(problem, resources);
}

bool has_kernel_for(Problem const& p, DecodeAttention const& call) {
  if (call.query.device.type != Device::Type::kCuda || call.query.dtype == DType::kFloat32) return false;
  Strides query = p.of_query;
  query.token = 0;
  return ops::decode_attention::has_kernel(p.width) && starts_on_16_bytes(p.query, query, call.query.dtype) &&
         starts_on_16_bytes(p.key, p.of_key, call.key.dtype) && starts_on_16_bytes(p.value, p.of_value, call.key.dtype);
}

}  // namespace

void check(DecodeAttention const& call) { checked(call); }

std::int64_t decode_attention_workspace(DecodeAttentionSizes const& sizes, int device) {
  bool const is_empty = std::min({sizes.batches, sizes.heads, sizes.key_heads, sizes.tokens}) < 1;
  if (is_empty || !fits_grid(sizes) || !ops::decode_attention::has_kernel(static_cast<int>(sizes.width))) return 0;
  Problem problem{};
  problem.batches = static_cast<int>(sizes.batches), problem.key_heads = static_cast<int>(sizes.key_heads);
  problem.tokens = static_cast<int>(sizes.tokens), problem.width = static_cast<int>(sizes.width);
  problem.group = static_cast<int>(sizes.heads / sizes.key_heads);
  std::optional<Plan> const plan = plan_on(device, problem, true);
  return plan && plan->has_workspace ? workspace_floats(problem, plan->split) : 0;
}

bool decode_attention(DecodeAttention const& call, Stream stream) {
  Problem problem = checked(call);
  if (call.out.numel() == 0) return true;
  if (!has_kernel_for(problem, call)) return false;
  int const device = call.query.device.index;
  std::optional<Plan> const plan = plan_on(device, problem, call.workspace.has_value());
  if (!plan) return false;
  if (plan->has_workspace) {
    std::int64_t const needed = workspace_floats(problem, plan->split);
    Checker const check("decode_attention", call.query.device);
    if (call.workspace->numel() < needed) {
      check.fail("workspace", "expected ", needed, " elements, got ", describe(*call.workspace));
    }
    problem.workspace = call.workspace->as<float>();
  }
  ops::decode_attention::launch(problem, call.query.dtype, kind_of(call.key.dtype), plan->split, device, stream);
  return true;
}

void check(RotateAndStore const& call) { checked(call); }

void rotate_and_store(RotateAndStore const& call, Stream stream) {
  RotateProblem const problem = checked(call);
  expect_device("rotate_and_store", "heads", call.heads, Device::Type::kCuda);
  if (call.heads.numel() == 0) return;
  ops::decode_attention::launch_rotate(problem, call.heads.dtype, call.heads.device.index, stream);
}

namespace ops::decode_attention {

bool has_kernel(int width) { return width == 64 || width == 128 || width == 256; }

Plan plan_of(Problem const& p, Resources const& resources) {
  constexpr int kFewestTokens = 48, kMostOfCluster = 8;  // of a CTA; CTAs of a cluster
  std::int64_t const ctas = std::int64_t{p.batches} * p.key_heads * ceil_div(p.group, kHeadsPerCta);
  // A CTA for each SM has enough loads in flight.
  int const split = static_cast<int>(std::min(resources.sm_count / ctas, ceil_div(p.tokens, kFewestTokens)));
  if (split <= 1) return {1, false};
  // Clusters of more than two CTAs leave SMs idle, but need no second kernel.
  if (resources.has_workspace && (split > 2 || !resources.has_clusters)) return {split, true};
  return {resources.has_clusters ? std::min(split, kMostOfCluster) : 1, false};
}

#if !EPILOQ_HAS_SM80 && !EPILOQ_HAS_SM90
void launch(Problem const&, DType, Kind, int, int device, Stream) { device_properties(device); }
#endif

#if !EPILOQ_HAS_CUDA
void launch_rotate(RotateProblem const&, DType, int device, Stream) { device_properties(device); }
#endif

}  // namespace ops::decode_attention
}  // namespace epiloq
