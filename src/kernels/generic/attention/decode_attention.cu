// Launches attention of one query token per sequence: decode_attention.cuh.

#include "core/cuda_check.h"
#include "epiloq/device.h"
#include "kernels/generic/attention/decode_attention.cuh"

namespace epiloq::ops::decode_attention {
namespace {

template <class T, Kind kKind, int kWidth>
void launch_kernel(Problem const& p, int split, int device, Stream stream) {
  using A = Attention<T, kKind, kWidth>;
  auto* const kernel = &attention_kernel<T, kKind, kWidth>;
  constexpr int kShared = sizeof(typename A::Shared);
  static PerDevice prepared;
  prepared.allow_shared(kernel, kShared, device);
  int const parts = (p.group + kHeadsPerCta - 1) / kHeadsPerCta;
  bool const merges = split > 1 && p.workspace != nullptr;
  dim3 const grid(split, p.key_heads * parts, p.batches), cluster(merges ? 1 : split);
  char const* const doing = "launching epiloq.decode_attention";
  cuda_check(launch_pdl_clusters(kernel, grid, cluster, A::L::kThreads, kShared, stream, p), doing);
  if (!merges) return;
  dim3 const heads(p.key_heads * p.group, p.batches);
  cuda_check(
      launch_pdl(&merge_kernel<T, kWidth>, heads, 32 * kMergeWarps, sizeof(MergeShared<kWidth>), stream, p, split),
      doing);
}

template <class T, Kind kKind>
void launch_kind(Problem const& p, int split, int device, Stream stream) {
  if (p.width == 64) return launch_kernel<T, kKind, 64>(p, split, device, stream);
  if (p.width == 128) return launch_kernel<T, kKind, 128>(p, split, device, stream);
  launch_kernel<T, kKind, 256>(p, split, device, stream);
}

template <class T>
void launch_typed(Problem const& p, Kind kind, int split, int device, Stream stream) {
  if (kind == Kind::kInt8) return launch_kind<T, Kind::kInt8>(p, split, device, stream);
  if (kind == Kind::kFloat8) return launch_kind<T, Kind::kFloat8>(p, split, device, stream);
  launch_kind<T, Kind::kHalf>(p, split, device, stream);
}

}  // namespace

void launch(Problem const& problem, DType query, Kind kind, int split, int device, Stream stream) {
  DeviceGuard const guard(device);
  if (query == DType::kFloat16) return launch_typed<__half>(problem, kind, split, device, stream);
  launch_typed<__nv_bfloat16>(problem, kind, split, device, stream);
}

}  // namespace epiloq::ops::decode_attention
