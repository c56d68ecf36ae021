#pragma once

// Work distribution of depthwise convolutions, which are bound by reading x: a thread computes kPixels output pixels
// below each other for a few neighbouring channels, so that rows come from L1 from the second tap on. Neighbouring
// threads take neighbouring channels, then neighbouring columns of pixels.

#include <algorithm>

#include "kernels/conv2d/im2col.h"

namespace epiloq::ops::conv2d::depthwise {

inline constexpr int kThreads = 256;
inline constexpr int kPixels = 4;
inline constexpr int kMaxLanes = 32;  // threads along the channels

struct Plan {
  int channels;    // per thread
  int lanes;       // per CTA
  int multiplier;  // output channels per input channel

  static Plan of(Shape const& s, int channels) {
    return {channels, std::min((s.co + channels - 1) / channels, kMaxLanes), s.co / s.ci};
  }
  dim3 grid(Shape const& s) const {
    unsigned const lines = static_cast<unsigned>(s.batch) * ((s.p + kPixels - 1) / kPixels);
    std::int64_t const columns = static_cast<std::int64_t>(lines) * s.q, each = kThreads / lanes;
    return dim3(static_cast<unsigned>((columns + each - 1) / each), (s.co + channels * lanes - 1) / (channels * lanes));
  }
};

// A thread's output pixels and channels.
struct ThreadPixels {
  int lane, n;      // n: the first channel
  int image, p, q;  // of the first pixel
  bool is_valid;
  Window window;       // of the first pixel
  std::int64_t down;   // from a pixel's window to the next one's
  std::int64_t first;  // index of the first pixel in out

  __device__ __forceinline__ ThreadPixels(Shape const& s, Plan const& plan) {
    int const columns = kThreads / plan.lanes, mine = threadIdx.x / plan.lanes;
    unsigned const column = blockIdx.x * columns + mine, line = column / s.q;
    unsigned const steps = (s.p + kPixels - 1) / kPixels;
    lane = threadIdx.x % plan.lanes;
    n = (blockIdx.y * plan.lanes + lane) * plan.channels;
    q = column % s.q;
    p = line % steps * kPixels;
    image = line / steps;
    is_valid = mine < columns && image < s.batch && n < s.co;
    window = window_of(s, image, p, q);
    down = s.stride_h * s.x_row;
    first = (static_cast<std::int64_t>(image) * s.p + p) * s.q + q;
  }
};

}  // namespace epiloq::ops::conv2d::depthwise
