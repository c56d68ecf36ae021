#pragma once

// The launches of weight-only convolution kernels: declared for the tables of dispatch/conv2d_weight_only, defined in
// its instantiate*.cuh and in kernels/conv2d/w4a16_depthwise.cu.

#include "kernels/conv2d/im2col.h"
#include "problems/conv2d_weight_only.h"

namespace epiloq::ops::conv2d_weight_only {

// A convolution as a GEMM with the implicit rows of im2col.h: output pixels are its tokens.
struct Patches {
  weight_only_mm::Problem product;
  conv2d::Shape shape;
  int channels, padded_channels;  // of a tap: in x, in the weight
  conv2d::Column step;            // the step from one K step to the next
  int windows_at;                 // bytes of shared memory before the tile's windows
};

using Launch = void (*)(Patches const&, int split, int device, Stream);

template <int kRow, DType kX, int kBits, int kGroups, bool kOffsets>
void launch_patches(Patches const& problem, int split, int device, Stream stream);
// Needs a shape that image_boxes.h has a map for.
template <int kRow, DType kX, int kBits, int kGroups>
void launch_wgmma(Patches const& problem, int split, int device, Stream stream);

void launch_depthwise(Problem const& problem, Stream stream);

}  // namespace epiloq::ops::conv2d_weight_only
