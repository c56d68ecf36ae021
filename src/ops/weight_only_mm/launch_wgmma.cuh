#pragma once

// A row of the wgmma table, for one type, width and group size, from the problem to the launch.

#include <algorithm>

#include "core/cuda_check.h"
#include "epiloq/device.h"
#include "gemm/params_cache.h"
#include "gemm/tensor_map.h"
#include "ops/weight_only_mm/rows.h"
#include "ops/weight_only_mm/wgmma.cuh"

namespace epiloq::ops::weight_only_mm {

// All that the maps are made from.
struct WgmmaReads {
  std::uint8_t const* q;
  void const* scale;
  std::uint8_t const* zero;
  void const* x;
  std::int64_t stride_x;
  int n, k, padded_k, bits, groups, scale_bytes, m;
  int rows, step_groups, token_box;

  bool operator==(WgmmaReads const&) const = default;
};

inline WgmmaMaps maps_of(WgmmaReads const& r) {
  using gemm::encode_tensor_map;
  auto const u64 = [](std::int64_t value) { return static_cast<std::uint64_t>(value); };
  auto const u32 = [](int value) { return static_cast<std::uint32_t>(value); };
  std::uint64_t const slabs = u64((r.n + kSlab - 1) / kSlab),
                      lines = u64(r.padded_k / kPadding) * slab_bytes(r.bits) / kLine;
  std::uint32_t const box_slabs = u32(r.rows / kSlab);
  auto const parameters = [&](void const* values, int bytes) {  // of a step, by slab
    std::uint64_t const of_slab = u64(r.groups) * kSlab * bytes;
    return encode_tensor_map(values, {of_slab, slabs}, {of_slab}, {u32(r.step_groups * kSlab * bytes), box_slabs},
                             CU_TENSOR_MAP_SWIZZLE_NONE);
  };
  WgmmaMaps maps{};
  maps.weights = encode_tensor_map(r.q, {kLine, lines, slabs}, {kLine, lines * kLine},
                                   {kLine, u32(slab_bytes(r.bits) / kLine), box_slabs}, CU_TENSOR_MAP_SWIZZLE_128B);
  maps.tokens = gemm::tensor_map_of(r.x, r.m, std::int64_t{r.k} * 2, r.stride_x * 2, r.token_box);
  maps.scales = parameters(r.scale, r.scale_bytes);
  if (r.zero != nullptr) maps.zeros = parameters(r.zero, 1);
  return maps;
}

// A model comes back with the same tensors.
inline WgmmaMaps const& cached_maps(WgmmaReads const& reads, int device) {
  thread_local gemm::ParamsCache<WgmmaReads, WgmmaMaps> cache;
  return cache.get(gemm::cache_key(reads.x, reads.q, reads.scale), reads, device, [&] { return maps_of(reads); });
}

template <int kRow, DType kX, int kBits, int kGroups>
void launch_wgmma(Problem const& p, int split, int device, Stream stream) {
  constexpr WgmmaConfig kConfig = kWgmmaRows[kRow];
  using C = Wgmma<CudaType<kX>, kBits, kGroups, kConfig.teams, kConfig.blocks, kConfig.tokens, kConfig.rounds>;
  auto* const kernel = wgmma_kernel<C>;
  static PerDevice prepared;
  int const shared_bytes = device_properties(device).shared_memory_per_block;
  prepared.once(device, [kernel, shared_bytes] {
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes - kBarrierBytes),
               "asking for shared memory");
  });
  Weight const& w = p.weight;
  int const scale_bytes = size_of(w.scale_dtype);
  WgmmaStage const stage(kConfig, kBits, kGroups, scale_bytes, w.zero != nullptr ? 1 : 0);
  constexpr int kEight = 8;  // tokens of the swizzle's pattern; those past the box are multiplied, and dropped
  int const token_box = std::min(C::kTokens, (p.m + kEight - 1) / kEight * kEight);
  // A single row may lie in rows of any length.
  std::int64_t const stride_x = p.m > 1 ? p.stride_x : (w.k + kEight - 1) / kEight * kEight;
  WgmmaReads const reads{w.q,    w.scale,  w.zero,      p.x, stride_x, w.n,     w.k,      w.padded_k,
                         w.bits, w.groups, scale_bytes, p.m, C::kRows, kGroups, token_box};
  auto const tiles_of = [](int size, int tile) { return (size + tile - 1) / tile; };
  int const token_tiles = tiles_of(p.m, C::kTokens), tiles = token_tiles * tiles_of(w.n, C::kRows);
  WgmmaParams const params{cached_maps(reads, device),
                           p,
                           stage,
                           wgmma_stages(stage, shared_bytes),
                           stage.loaded_bytes(C::kTokens - token_box),
                           tiles,
                           token_tiles};
  int const bytes = wgmma_shared_bytes(kConfig, stage, shared_bytes);
  int const blocks = split > 1 ? tiles : std::min(tiles, device_properties(device).sm_count);
  dim3 const grid(blocks, split);
  cuda_check(launch_dependent_clusters(kernel, grid, dim3(1, split), C::kThreads, bytes, stream, params),
             "launching epiloq.weight_only_mm");
}

}  // namespace epiloq::ops::weight_only_mm
