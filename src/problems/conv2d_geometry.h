#pragma once

#include <cstdint>

namespace epiloq::ops::conv2d {

// Sizes of a convolution. Each fits an int; products may not.
struct Shape {
  int batch, h, w, ci;
  int p, q, co;
  int kh, kw;
  int stride_h, stride_w;
  int top, left;  // padding before; padding after is accounted for in p and q
  int dilation_h, dilation_w;
  int groups;
  // Elements between images, rows and pixels; channels are dense.
  std::int64_t x_image, x_row, x_pixel, out_pixel;

  bool operator==(Shape const&) const = default;
};

}  // namespace epiloq::ops::conv2d
