#pragma once

// Where the kernels live: declared here for the launch tables, defined in patches.cuh, wgmma.cuh and depthwise.cu;
// tiles are instantiated a table row and type at a time in sources that CMake expands from kernels*.cu.in.

#include "ops/conv2d/im2col.h"
#include "ops/conv2d_weight_only/configs.h"
#include "ops/conv2d_weight_only/kernels.h"

namespace epiloq::ops::conv2d_weight_only {

// A convolution as weight_only_mm's product with the rows of im2col.h, whose tokens are output pixels.
struct Patches {
  weight_only_mm::Problem product;
  conv2d::Shape shape;
  int channels, padded_channels;  // of a tap: in x, in the weight
  conv2d::Column step;            // the walk from one step of K to the next
  int windows_at;                 // bytes of shared memory before the tile's windows
};

using Launch = void (*)(Patches const&, int split, int device, Stream);

template <int kRow, DType kX, int kBits, int kGroups, bool kOffsets>
void launch_patches(Patches const& problem, int split, int device, Stream stream);
// Where image_boxes.h has a map of the shape.
template <int kRow, DType kX, int kBits, int kGroups>
void launch_wgmma(Patches const& problem, int split, int device, Stream stream);

void launch_depthwise(Problem const& problem, Stream stream);

}  // namespace epiloq::ops::conv2d_weight_only
