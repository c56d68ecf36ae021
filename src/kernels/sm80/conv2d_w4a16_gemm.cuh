#pragma once

// Weight-only convolution with mma.sync: the W4A16 GEMM with tokens copied from an image, 8 channels of a tap at a
// time, zeros outside.

#include "kernels/launch/conv2d_weight_only.h"
#include "kernels/sm80/w4a16/gemm.cuh"

namespace epiloq::ops::conv2d_weight_only {

namespace wo = weight_only_mm;

// A thread copies one chunk of every kApart-th pixel, like Tiled::Tokens.
template <class S, class T>
struct PatchTokens {
  static constexpr int kApart = S::kThreads / S::kChunks;

  Patches const& p;
  conv2d::Window const* windows;  // from this thread's first pixel on
  conv2d::Column column;          // of its chunk, in the next step to be issued
  int to;

  // Called by every thread of the CTA.
  __device__ __forceinline__ PatchTokens(Patches const& patches, conv2d::Window* shared, int first_pixel,
                                         int first_step)
      : p(patches) {
    int const pixel = threadIdx.x / S::kChunks, chunk = threadIdx.x % S::kChunks;
    for (int i = threadIdx.x; i < S::kTokens; i += S::kThreads) {
      shared[i] = window_of(p.shape, static_cast<unsigned>(first_pixel + i));
    }
    __syncthreads();
    windows = shared + pixel;
    column = conv2d::Column::of(p.shape, p.padded_channels, first_step * wo::kStep + chunk * 8);
    to = wo::TokenLayout::of(pixel, chunk);
  }

  // Steps are issued in order, each once.
  __device__ __forceinline__ void issue(void const* valid_address, SharedAddress tile, int) {
    auto const* const x = static_cast<T const*>(p.product.x);
    conv2d::Offset const offset(p.shape, column);
    int const bytes = min(max(p.channels - column.channel, 0), 8) * 2;
#pragma unroll
    for (int i = 0; i < S::kTokens / kApart; ++i) {
      conv2d::Window const window = windows[i * kApart];
      bool const is_valid = bytes > 0 && is_inside(p.shape, window, offset);
      cp_async16(tile + to + i * kApart * wo::TokenLayout::kBytes,
                 is_valid ? x + (window.at + offset.at) : valid_address, is_valid ? bytes : 0);
    }
    column.advance(p.shape, p.padded_channels, p.step);
  }
};

template <class S, class T>
__global__ __launch_bounds__(S::kThreads,
                             S::kBlocks) void patches_kernel(__grid_constant__ Patches const p,
                                                             __grid_constant__ wo::StageLayout const layout) {
  extern __shared__ __align__(wo::kSharedLine) std::uint8_t shared[];
  auto* const windows = reinterpret_cast<conv2d::Window*>(shared + p.windows_at);
  auto const make_tokens = [&](int first_pixel, int first_step) {
    return PatchTokens<S, T>(p, windows, first_pixel, first_step);
  };
  wo::multiply_tile<S, T>(p.product, layout, shared, make_tokens);
}

}  // namespace epiloq::ops::conv2d_weight_only
