#pragma once

// A convolution as an implicit GEMM: row m of the left operand is an output pixel, column k = (kh, kw, c) a tap and a
// channel of its group, c fastest. The matrix is never in memory; these functions compute where in x its elements are,
// for kernels and for host tests.

#include <cstdint>

#include "epilogue/expr.h"
#include "problems/conv2d_geometry.h"

namespace epiloq::ops::conv2d {

// Images have at most kMaxSide rows and columns, at most kMaxStride elements apart. kNowhere lies outside all of them,
// and so does the sum of two such offsets, which still fits an int.
inline constexpr int kMaxSide = 1 << 28;
inline constexpr std::int64_t kMaxStride = (std::int64_t{1} << 31) - 1;
inline constexpr int kNowhere = 1 << 29;

// Of the output; checked to fit an int.
EPILOQ_HD inline unsigned pixels(Shape const& s) { return static_cast<unsigned>(s.batch) * s.p * s.q; }

// An output pixel's window: the position of its first tap, which may lie outside the image.
struct Window {
  std::int64_t at = 0;  // element of x, first channel
  int y = kNowhere, x = 0;
};

EPILOQ_HD inline Window window_of(Shape const& s, int image, int p, int q) {
  int const y = p * s.stride_h - s.top, x = q * s.stride_w - s.left;
  return {image * s.x_image + y * s.x_row + x * s.x_pixel, y, x};
}
EPILOQ_HD inline Window window_of(Shape const& s, unsigned pixel) {
  if (pixel >= pixels(s)) return {};
  unsigned const line = pixel / s.q;
  return window_of(s, static_cast<int>(line / s.p), static_cast<int>(line % s.p), static_cast<int>(pixel % s.q));
}

// A column, and steps by a fixed number of columns without a division. `channels` are those of a tap, including the
// weight's padding.
struct Column {
  int kh, kw, channel;

  EPILOQ_HD static Column of(Shape const& s, int channels, int k) {
    int const tap = k / channels;
    return {tap / s.kw, tap % s.kw, k % channels};
  }
  EPILOQ_HD void advance(Shape const& s, int channels, Column by) {
    channel += by.channel;
    bool const next_tap = channel >= channels;
    channel -= next_tap ? channels : 0;
    kw += by.kw + (next_tap ? 1 : 0);
    bool const next_line = kw >= s.kw;
    kw -= next_line ? s.kw : 0;
    kh += by.kh + (next_line ? 1 : 0);
  }
};

// A column's position relative to a window's first tap; nowhere if past the last one.
struct Offset {
  std::int64_t at = 0;
  int y = kNowhere, x = 0;

  Offset() = default;
  EPILOQ_HD Offset(Shape const& s, Column c) {
    if (c.kh >= s.kh) return;
    y = c.kh * s.dilation_h;
    x = c.kw * s.dilation_w;
    // A 32 x 32-bit product is one instruction.
    at = static_cast<std::int64_t>(y) * static_cast<int>(s.x_row) +
         static_cast<std::int64_t>(x) * static_cast<int>(s.x_pixel) + c.channel;
  }
};

inline bool fits(Shape const& s) {
  return s.h <= kMaxSide && s.w <= kMaxSide && s.x_row <= kMaxStride && s.x_pixel <= kMaxStride;
}

EPILOQ_HD inline bool is_inside(Shape const& s, Window w, Offset o) {
  bool const in_y = static_cast<unsigned>(w.y + o.y) < static_cast<unsigned>(s.h);
  bool const in_x = static_cast<unsigned>(w.x + o.x) < static_cast<unsigned>(s.w);
  return in_y & in_x;
}

}  // namespace epiloq::ops::conv2d
