#pragma once

#include "core/checks.h"
#include "epiloq/conv2d.h"

namespace epiloq::ops::conv2d {

// A convolution's sizes, as kernels see them. Every one fits an int, products may not.
struct Shape {
  int batch, h, w, ci;
  int p, q, co;
  int kh, kw;
  int stride_h, stride_w;
  int top, left;  // padding before; what is padded after has already made p and q
  int dilation_h, dilation_w;
  int groups;
  // Elements from one image, row and pixel to the next; channels are dense.
  std::int64_t x_image, x_row, x_pixel, out_pixel;

  bool operator==(Shape const&) const = default;
};

struct Kernel {
  std::int64_t co, kh, kw, channels;  // channels: of one group
};

// Checks x, out and the geometry against each other and the kernel.
Shape checked_shape(Checker const& check, TensorView const& out, TensorView const& x, Kernel const& kernel,
                    Conv2dGeometry const& geometry);

}  // namespace epiloq::ops::conv2d
