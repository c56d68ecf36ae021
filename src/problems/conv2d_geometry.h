#pragma once

#include "core/checks.h"
#include "epiloq/conv2d.h"

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

struct Kernel {
  std::int64_t co, kh, kw, channels;  // channels: per group
};

// Checks x, out and the geometry against each other and the kernel.
Shape checked_shape(Checker const& check, TensorView const& out, TensorView const& x, Kernel const& kernel,
                    Conv2dGeometry const& geometry);

}  // namespace epiloq::ops::conv2d
